"""A tokenizer from a GGUF file's metadata, for the kinds "gpt2" (byte-level BPE) and "llama"."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxgen.text.backend_errors import refused
from jaxgen.text.byte_level import LINEAGES, byte_level_tokenizer, merge_pairs
from jaxgen.text.chat_template import ChatTemplate
from jaxgen.text.sentencepiece_model import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Piece,
    Spelling,
    sentencepiece_tokenizer,
)
from jaxgen.text.tokenizer import Tokenizer
from jaxgen_checkpoints.errors import CheckpointError

_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_PREFIX = "tokenizer.ggml."


def gguf_tokenizer(
    metadata: Mapping[str, Any],
    *,
    vocab_size: int | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """The tokenizer that `metadata` (the file's raw tokenizer.* values) describes.

    Raises CheckpointError naming the metadata key that is missing or not supported.
    """
    tokens = [str(token) for token in _need(metadata, "tokens")]
    kinds = [int(kind) for kind in metadata.get(_PREFIX + "token_type", [NORMAL] * len(tokens))]
    if len(kinds) != len(tokens):
        message = f"{_PREFIX}token_type has {len(kinds)} entries for {len(tokens)} tokens"
        raise CheckpointError(message)
    model = _need(metadata, "model")
    if model == "gpt2":
        backend = _byte_level(metadata, tokens, kinds)
    elif model == "llama":
        scores = [float(score) for score in _need(metadata, "scores")]
        pieces = [Piece(*entry) for entry in zip(tokens, scores, kinds, strict=True)]
        prefix = bool(metadata.get(_PREFIX + "add_space_prefix", True))
        backend = sentencepiece_tokenizer(pieces, Spelling(dummy_prefix=prefix))
    else:
        message = f"{_PREFIX}model {model!r} is not supported (gpt2 and llama are): use the folder"
        raise CheckpointError(message)
    special = _special_tokens(metadata, tokens)
    template = chat_template or metadata.get("tokenizer.chat_template")
    by_default = model == "llama" or metadata.get(_PREFIX + "pre") in ("llama-bpe", "llama3")
    return Tokenizer(
        backend,
        special_tokens=special,
        add_bos=bool(metadata.get(_PREFIX + "add_bos_token", by_default)),
        add_eos=bool(metadata.get(_PREFIX + "add_eos_token", False)),
        chat_template=ChatTemplate(template, special) if template else None,
        vocab_size=vocab_size,
    )


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> tokenizers.Tokenizer:
    lineage = str(metadata.get(_PREFIX + "pre", "default"))
    if lineage not in LINEAGES:
        known = ", ".join(sorted(LINEAGES))
        message = (
            f"{_PREFIX}pre {lineage!r} is not known (known: {known}), and a guess at how it cuts "
            "text would give wrong ids: use the model's folder with tokenizer.json"
        )
        raise CheckpointError(message)
    merges = merge_pairs(_need(metadata, "merges"), _PREFIX + "merges")
    ids = {token: place for place, token in enumerate(tokens)}
    with refused("the GGUF file's tokens and merges do not fit"):
        backend = byte_level_tokenizer(ids, merges, LINEAGES[lineage])
    for kind, special in ((UNKNOWN, True), (CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, its in zip(tokens, kinds, strict=True)
            if its == kind
        ]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    return backend


def _need(metadata: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401
    value = metadata.get(_PREFIX + key)
    if value is None:
        raise CheckpointError(f"the GGUF file has no tokenizer: {_PREFIX}{key} is missing")
    return value


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    found = {}
    for name, key in _IDS.items():
        token_id = metadata.get(_PREFIX + key)
        if token_id is not None and 0 <= int(token_id) < len(tokens):
            found[name] = tokens[int(token_id)]
    return found
