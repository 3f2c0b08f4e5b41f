"""From a checkpoint folder to a Tokenizer, whichever vocabulary file there is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jaxgen.text.added_tokens import add_tokens, named_special_tokens
from jaxgen.text.backend_errors import refused
from jaxgen.text.byte_level import byte_level_tokenizer, merge_pairs
from jaxgen.text.chat_template import ChatTemplate
from jaxgen.text.sentencepiece_model import read_sentencepiece
from jaxgen.text.tiktoken_file import read_tiktoken
from jaxgen.text.tokenizer import Tokenizer
from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.json_file import read_json_object

FURTHER_TEMPLATES = "additional_chat_templates"
VOCABULARY_FILES = ("tokenizer.json", "vocab.json + merges.txt", "tokenizer.model", "qwen.tiktoken")


def load_tokenizer(
    folder: str | Path, *, vocab_size: int | None = None, chat_template: str | None = None
) -> Tokenizer:
    """The tokenizer of a Hugging Face folder; `chat_template` (its text) replaces the folder's own.

    Raises CheckpointError naming the file that is unreadable, or the files looked for.
    """
    folder = Path(folder)
    config = _optional_json(folder / "tokenizer_config.json")
    entries = {**_optional_json(folder / "special_tokens_map.json"), **config}
    special = named_special_tokens(entries)
    template = chat_template or _template_source(folder, config)
    backend = _vocabulary(folder, config)
    add_tokens(backend, folder, entries, vocab_size)
    return Tokenizer(
        backend,
        special_tokens=special,
        add_bos=config.get("add_bos_token"),
        add_eos=config.get("add_eos_token"),
        chat_template=ChatTemplate(template, special) if template else None,
        vocab_size=vocab_size,
    )


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds any vocabulary that `load_tokenizer` reads."""
    choices = (names.split(" + ") for names in VOCABULARY_FILES)
    return any(all((folder / name).exists() for name in names) for names in choices)


def _vocabulary(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    ready = folder / "tokenizer.json"
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    pieces, ranks = folder / "tokenizer.model", folder / "qwen.tiktoken"
    if ready.is_file():
        return _from_tokenizer_json(ready)
    if vocabulary.is_file() and merges.is_file():
        return _from_vocab_and_merges(vocabulary, merges, config)
    if pieces.is_file():
        return read_sentencepiece(pieces)
    if ranks.is_file():
        return read_tiktoken(ranks)
    message = (
        f"no tokenizer in {folder}: looked for {', '.join(VOCABULARY_FILES)}; copy the model's "
        "tokenizer.json there, name another folder with --tokenizer, or work with token ids"
    )
    raise CheckpointError(message)


def _from_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    with refused(f"{path} cannot be read as a tokenizer"):
        return tokenizers.Tokenizer.from_buffer(path.read_bytes())


def _from_vocab_and_merges(
    vocabulary: Path, merges: Path, config: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """GPT-2's and Qwen2's files: byte-level BPE, cut as the tokenizer's class does."""
    ids = read_json_object(vocabulary)
    lines = _read_text(merges).splitlines()
    rules = [line for line in lines if line and not line.startswith("#version")]
    pairs = merge_pairs(rules, str(merges))
    cut = "qwen2" if str(config.get("tokenizer_class")).startswith("Qwen2") else "gpt-2"
    prefix = cut == "gpt-2" and bool(config.get("add_prefix_space"))
    with refused(f"{vocabulary} and {merges.name} are no BPE vocabulary"):
        return byte_level_tokenizer(ids, pairs, cut, add_prefix_space=prefix)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error}") from error


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """chat_template.jinja and the named ones in additional_chat_templates, else those of
    tokenizer_config.json, one or a list of named ones, else chat_template.json's, where older files
    of models that take images have it.
    """
    further = sorted((folder / FURTHER_TEMPLATES).glob("*.jinja"))
    named = {"default": folder / "chat_template.jinja", **{path.stem: path for path in further}}
    written = {name: _read_text(path) for name, path in named.items() if path.is_file()}
    if written:
        return written
    where, given = folder / "tokenizer_config.json", config.get("chat_template")
    if not given:
        where = folder / "chat_template.json"
        given = _optional_json(where).get("chat_template")
    if not given or isinstance(given, str):
        return given or None
    if isinstance(given, list) and all(isinstance(entry, Mapping) for entry in given):
        return {str(entry.get("name")): str(entry.get("template")) for entry in given}
    raise CheckpointError(f"{where}: chat_template must be a text or a list of named templates")
