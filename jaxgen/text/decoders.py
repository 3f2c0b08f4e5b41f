"""What one token contributes to the text, as bytes: the ground of streaming and of logprobs.

Two kinds of vocabulary cover the families served: byte-level BPE, where every character of a token
stands for a byte, and SentencePiece, where "▁" stands for a space and `<0xE4>` for a byte.
"""

import functools
import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TextRules:
    """How a vocabulary spells text: its kind, and whether the text's first space is dropped."""

    byte_level: bool
    strip_first_space: bool
    byte_tokens: bool

    def spell(self, token: str) -> bytes:
        """The bytes that one vocabulary entry stands for."""
        if self.byte_level:
            table = byte_of_character()
            if all(character in table for character in token):
                return bytes(table[character] for character in token)
            return token.encode()
        if self.byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode()


def text_rules(tokenizer: tokenizers.Tokenizer) -> TextRules | None:
    """The rules of a tokenizer's decoder; None where it is of neither kind."""
    if tokenizer.decoder is None:
        return None
    decoder = json.loads(tokenizer.decoder.__getstate__())
    if decoder["type"] == "ByteLevel":
        return TextRules(byte_level=True, strip_first_space=False, byte_tokens=False)
    if decoder["type"] == "Metaspace" and decoder.get("replacement") == "▁":
        strip = decoder.get("prepend_scheme", "always") != "never"
        return TextRules(byte_level=False, strip_first_space=strip, byte_tokens=False)
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else []
    kinds = [step["type"] for step in steps]
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or steps[0] != spaces:
        return None
    if kinds[3:] == ["Strip"] and _is_first_space(steps[3]):
        return TextRules(byte_level=False, strip_first_space=True, byte_tokens=True)
    if len(kinds) == 3:
        return TextRules(byte_level=False, strip_first_space=False, byte_tokens=True)
    return None


def _is_first_space(step: dict[str, Any]) -> bool:
    return (step["content"], step["start"], step["stop"]) == (" ", 1, 0)


@functools.cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's stand-ins, character -> byte: printable bytes are themselves, others 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
