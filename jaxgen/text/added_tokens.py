"""Tokens that the small files beside a vocabulary name: they are added to it, or marked as special.

tokenizer_config.json counts for more than the vocabulary's own file, as in transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxgen.text.backend_errors import refused
from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.json_file import read_json_object

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_FURTHER = ("extra_special_tokens", "additional_special_tokens")


def named_special_tokens(entries: Mapping[str, Any]) -> dict[str, str]:
    """Name -> token, of the names that every tokenizer may have."""
    named = {name: _content(entries.get(name)) for name in SPECIAL_NAMES}
    return {name: token for name, token in named.items() if token is not None}


def add_tokens(
    backend: tokenizers.Tokenizer,
    folder: Path,
    entries: Mapping[str, Any],
    vocab_size: int | None,
) -> None:
    """Add what the config's added_tokens_decoder or, without one, added_tokens.json lists, in the
    order of the ids, then special tokens that the vocabulary lacks: named ones, then further ones.

    `entries`: tokenizer_config.json over special_tokens_map.json. `vocab_size`: a special token
    that the model has no room for is left out.
    """
    special = [*named_special_tokens(entries).values(), *_further_special_tokens(entries)]
    # All at once, here and below: each call goes over every added token, of which Gemma has 6,400.
    backend.add_tokens(_listed(folder, entries, special))
    added = {entry.content for entry in backend.get_added_tokens_decoder().values()}
    lacking = [content for content in dict.fromkeys(special) if content not in added]
    unknown = [content for content in lacking if backend.token_to_id(content) is None]
    room = None if vocab_size is None else max(0, vocab_size - backend.get_vocab_size())
    left_out = set() if room is None else set(unknown[room:])
    backend.add_tokens(
        [
            AddedToken(content, special=True, normalized=False)
            for content in lacking
            if content not in left_out
        ]
    )


def _listed(folder: Path, entries: Mapping[str, Any], special: list[str]) -> list[AddedToken]:
    listed = entries.get("added_tokens_decoder")
    if listed is not None:
        with refused(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder lists no tokens"):
            return _from_decoder(listed)
    older = folder / "added_tokens.json"
    places = read_json_object(older) if older.is_file() else {}
    if not all(isinstance(place, int) for place in places.values()):
        raise CheckpointError(f"{older} must give each token its id")
    contents = sorted(places, key=places.__getitem__)
    return [
        AddedToken(content, special=content in special, normalized=content not in special)
        for content in contents
    ]


def _from_decoder(listed: Mapping[str, Mapping[str, Any]]) -> list[AddedToken]:
    """id -> token with its flags, in the order of the ids."""
    return [
        AddedToken(
            entry["content"],
            single_word=entry.get("single_word", False),
            lstrip=entry.get("lstrip", False),
            rstrip=entry.get("rstrip", False),
            normalized=entry.get("normalized", False),
            special=entry.get("special", False),
        )
        for _, entry in sorted(listed.items(), key=lambda item: int(item[0]))
    ]


def _further_special_tokens(entries: Mapping[str, Any]) -> list[str]:
    """Special tokens without a name of everybody's: a list, or name -> token."""
    key = next((key for key in _FURTHER if entries.get(key)), _FURTHER[0])
    given = entries.get(key) or []
    if not isinstance(given, (Mapping, list)):
        raise CheckpointError(f"{key} of the tokenizer's config must be a list, not {given!r:.40}")
    listed = given.values() if isinstance(given, Mapping) else given
    tokens = [_content(entry) for entry in listed]
    return [token for token in tokens if token is not None]


def _content(entry: object) -> str | None:
    """A token, written as text or as an object with its content."""
    content = entry.get("content") if isinstance(entry, Mapping) else entry
    return content if isinstance(content, str) else None
