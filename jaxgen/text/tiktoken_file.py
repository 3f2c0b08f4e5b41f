"""Qwen's first tokenizer file (qwen.tiktoken): byte strings and their ranks, no merges.

The halves of a merge are what byte pair encoding makes of the token when that merge is forbidden.
"""

import base64
import binascii
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from jaxgen.text.byte_level import byte_level_tokenizer
from jaxgen.text.decoders import byte_of_character
from jaxgen_checkpoints.errors import CheckpointError

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205)))


def read_tiktoken(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a qwen.tiktoken file. Raises CheckpointError naming the bad line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(f"{path}:{number} is no token and rank: {error}") from error
    character = {byte: sign for sign, byte in byte_of_character().items()}

    def spelled(token: bytes) -> str:
        return "".join(character[byte] for byte in token)

    merges = [
        (spelled(pair[0]), spelled(pair[1]))
        for token in sorted(ranks, key=ranks.__getitem__)
        if len(token) > 1 and len(pair := _halves(token, ranks)) == 2
    ]
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    backend = byte_level_tokenizer(vocabulary, merges, "qwen2")
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return backend


def _halves(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """What is left of `token` after all merges of lower rank than its own."""
    parts = [bytes([byte]) for byte in token]
    while True:
        joined = [(ranks.get(parts[i] + parts[i + 1]), i) for i in range(len(parts) - 1)]
        lower = [(rank, i) for rank, i in joined if rank is not None and rank < ranks[token]]
        if not lower:
            return parts
        _, i = min(lower)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
