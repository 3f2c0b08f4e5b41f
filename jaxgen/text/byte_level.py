"""Byte-level BPE tokenizers from bare vocabularies: how each lineage cuts text before merging.

A vocabulary without tokenizer.json names its lineage only; the expression that cuts text into words
is knowledge, and a wrong one gives fluent, wrong ids.
"""

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from jaxgen_checkpoints.errors import CheckpointError

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

LINEAGES: Mapping[str, str] = {
    "gpt-2": "gpt-2",
    "default": "gpt-2",
    "phi-2": "gpt-2",
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "jais": "gpt-2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "command-r": "digits",
    "codeshell": "digits",
    "exaone": "digits",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
"""GGUF's `tokenizer.ggml.pre` -> how text is cut."""


def byte_level_tokenizer(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    cut: str,
    *,
    add_prefix_space: bool = False,
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer; `cut` is one of LINEAGES' values. `add_prefix_space`: "gpt-2"
    puts a space in front of a text that has none.
    """
    # Llama 3 takes a whole word that is in the vocabulary, even where no merges lead to it.
    model = models.BPE(vocab=dict(vocabulary), merges=list(merges), ignore_merges=cut == "llama3")
    backend = tokenizers.Tokenizer(model)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if cut == "gpt-2":
        backend.pre_tokenizer = gpt2
    elif cut == "digits":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    else:
        words = LLAMA3_WORDS if cut == "llama3" else QWEN2_WORDS
        split = pre_tokenizers.Split(Regex(words), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def merge_pairs(rules: Sequence[str], where: str) -> list[tuple[str, str]]:
    """Merge rules ("a b") as pairs. Raises CheckpointError naming `where` for any other line."""
    pairs = []
    for rule in rules:
        left, _, right = str(rule).partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(f"{where} must hold rules of two words, not {rule!r}")
        pairs.append((left, right))
    return pairs
