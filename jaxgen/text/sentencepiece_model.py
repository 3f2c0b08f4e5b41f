"""A SentencePiece BPE vocabulary (tokenizer.model, or GGUF's "llama" kind) as a `tokenizers` one.

SentencePiece joins the neighbours whose union has the best score; `tokenizers` joins by merge rank.
Every way to split a piece into two pieces, ranked by the piece's score, says the same.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from jaxgen_checkpoints.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of pieces, numbered as in SentencePiece's files and in GGUF."""

_BPE = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry; its place in the list is its id."""

    text: str
    score: float
    kind: int


def read_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer in a tokenizer.model file. Raises CheckpointError if it is of another kind."""
    try:
        pieces, model_type, dummy_prefix = _parse(path.read_bytes())
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(f"{path} is no SentencePiece model: {error}") from error
    if model_type != _BPE:
        message = (
            f"{path} is a SentencePiece model of type {model_type}; only BPE (2) can be read from "
            "tokenizer.model: provide tokenizer.json"
        )
        raise CheckpointError(message)
    return sentencepiece_tokenizer(pieces, dummy_prefix=dummy_prefix)


def sentencepiece_tokenizer(pieces: Sequence[Piece], *, dummy_prefix: bool) -> tokenizers.Tokenizer:
    """The tokenizer of these pieces; `dummy_prefix` puts a space in front of every text."""
    ids = {piece.text: place for place, piece in enumerate(pieces)}
    unknown = next((piece.text for piece in pieces if piece.kind == UNKNOWN), None)
    model = models.BPE(
        vocab=ids,
        merges=_merges(pieces),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=any(piece.kind == BYTE for piece in pieces),
    )
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(
        [
            AddedToken(piece.text, special=True, normalized=False)
            for piece in pieces
            if piece.kind in (UNKNOWN, CONTROL)
        ]
    )
    backend.add_tokens(
        [AddedToken(piece.text, normalized=False) for piece in pieces if piece.kind == USER_DEFINED]
    )
    spaces = normalizers.Replace(" ", "▁")
    first = [normalizers.Prepend("▁")] if dummy_prefix else []
    backend.normalizer = normalizers.Sequence([*first, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if dummy_prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    joinable = {piece.text: place for place, piece in enumerate(pieces) if piece.kind == NORMAL}
    ranked = []
    for text in joinable:
        score = pieces[joinable[text]].score
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in joinable and right in joinable:
                ranked.append((-score, joinable[left], joinable[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _parse(data: bytes) -> tuple[list[Piece], int, bool]:
    """The pieces, the model type and add_dummy_prefix of a serialised ModelProto."""
    pieces, model_type, dummy_prefix = [], 1, True
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            entry = dict(_fields(value))
            text, score = _bytes(entry.get(1, b"")), _bytes(entry.get(2, b"\0\0\0\0"))
            kind = int(entry.get(3, NORMAL))
            pieces.append(Piece(text.decode(), struct.unpack("<f", score)[0], kind))
        elif number == 2 and isinstance(value, bytes):
            model_type = int(dict(_fields(value)).get(3, 1))
        elif number == 3 and isinstance(value, bytes):
            dummy_prefix = bool(dict(_fields(value)).get(3, 1))
    if not pieces:
        raise ValueError("it holds no pieces")
    return pieces, model_type, dummy_prefix


def _bytes(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise ValueError("a piece holds a number in place of its text or score")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(field number, value) of one protobuf message: varints as int, everything else as bytes."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire} at byte {place}")
        size, place = _varint(data, place) if wire == 2 else ({1: 8, 5: 4}[wire], place)
        if place + size > len(data):
            raise ValueError(f"it ends inside a field of {size} bytes")
        yield number, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
        if shift > 63:
            raise ValueError(f"a number longer than 64 bits at byte {place}")
