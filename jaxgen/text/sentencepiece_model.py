"""A SentencePiece BPE vocabulary (tokenizer.model, or GGUF's "llama" kind) as a `tokenizers` one.

SentencePiece joins the neighbours whose union has the best score; `tokenizers` joins by merge rank.
Every way to split a piece into two pieces, ranked by the piece's score, says the same.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from jaxgen.text.backend_errors import refused
from jaxgen_checkpoints.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of pieces, numbered as in SentencePiece's files and in GGUF."""

_BPE = 2
_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry; its place in the list is its id."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True)
class Spelling:
    """What happens to a text before it is cut. `charsmap` replaces characters (SentencePiece's own
    binary form; empty for none), `single_spaces` drops spaces at both ends and repeated ones,
    `dummy_prefix` puts a space in front.
    """

    charsmap: bytes = b""
    single_spaces: bool = False
    dummy_prefix: bool = True

    def normalizer(self) -> normalizers.Normalizer:
        """The same as the tokenizer's steps."""
        steps: list[normalizers.Normalizer] = []
        if self.charsmap:
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.single_spaces:
            steps.append(normalizers.Replace(Regex("^ +| +$"), ""))
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        if self.dummy_prefix:
            steps.append(normalizers.Prepend(_SPACE))
        return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def read_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer in a tokenizer.model file. Raises CheckpointError if it is of another kind."""
    try:
        pieces, model_type, spelling = _parse(path.read_bytes())
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(f"{path} is no SentencePiece model: {error}") from error
    if model_type != _BPE:
        message = (
            f"{path} is a SentencePiece model of type {model_type}; only BPE (2) can be read from "
            "tokenizer.model: provide tokenizer.json"
        )
        raise CheckpointError(message)
    with refused(f"{path} is no SentencePiece model"):
        return sentencepiece_tokenizer(pieces, spelling)


def sentencepiece_tokenizer(pieces: Sequence[Piece], spelling: Spelling) -> tokenizers.Tokenizer:
    """The tokenizer of these pieces."""
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
        [
            AddedToken(piece.text, normalized=False)
            for piece in pieces
            if piece.kind == USER_DEFINED and not _is_joined(piece)
        ]
    )
    backend.normalizer = spelling.normalizer()
    strip = [decoders.Strip(" ", 1, 0)] if spelling.dummy_prefix else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _is_joined(piece: Piece) -> bool:
    """Whether merges lead to a piece. The user's own are looked for in the text as it is written,
    but those with spaces in them, like Gemma's runs of spaces, stand there only once it is spelled.
    """
    return piece.kind == NORMAL or (piece.kind == USER_DEFINED and _SPACE in piece.text)


def _merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    joinable = {piece.text: place for place, piece in enumerate(pieces) if _is_joined(piece)}
    ranked = []
    for text in joinable:
        score = pieces[joinable[text]].score
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in joinable and right in joinable:
                ranked.append((-score, joinable[left], joinable[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _parse(data: bytes) -> tuple[list[Piece], int, Spelling]:
    """The pieces, the model type and the normaliser's settings of a serialised ModelProto."""
    pieces, model_type, normalizer = [], 1, {}
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            entry = dict(_fields(value))
            text, score = _bytes(entry.get(1, b"")), _bytes(entry.get(2, b"\0\0\0\0"))
            kind = int(entry.get(3, NORMAL))
            pieces.append(Piece(text.decode(), struct.unpack("<f", score)[0], kind))
        elif number == 2 and isinstance(value, bytes):
            model_type = int(dict(_fields(value)).get(3, 1))
        elif number == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("it holds no pieces")
    spelling = Spelling(
        charsmap=_bytes(normalizer.get(2, b"")),
        single_spaces=bool(normalizer.get(4, 1)),
        dummy_prefix=bool(normalizer.get(3, 1)),
    )
    return pieces, model_type, spelling


def _bytes(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise ValueError("it holds a number in place of text")
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
