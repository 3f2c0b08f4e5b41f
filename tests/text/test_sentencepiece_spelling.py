"""A tokenizer.model's own rules of spelling give SentencePiece's ids."""

import base64
import struct
import zlib

import pytest

from jaxgen.text import load_tokenizer

# SentencePiece 0.2's own bytes for two rules: "A" becomes "a", "①" becomes "1".
CHARSMAP = zlib.decompress(
    base64.b64decode(
        b"eNod0wWQkFUQAOCfG1LpEpBGEAlppOHoEBSVzqO7O4/uOJBQDz0cEFAJ6RJQurs7le7O73gz39uZnZ3Z"
        b"md3ZIGbgxQhCEwRBSBCER0SGBFGxonNBeBxfbOIRlw/5AKVBfBKRkCQkJhlJSUFyPiIlqUnFx6QhHWnJ"
        b"QHoykZEsZCYrn/Ap2fiM7OQkB7nJRR4+Jx95KUB+ClGQLyhMUYpQnGKUpASlKUUoZShHWSpQnkpUpAqV"
        b"qUZVqvMlX1GDmnzNt3xDLb6jDrWpR10aUJ9GNKQJjQmjKc1pRkta0JpWtKUN7WlHRzrQmU50pQvd6UZP"
        b"etCbXvSlD/3px0AGMJhBDIleNsMYygiGM4qRjGE04xjLBMYziYlEMJmpTGEa3zOD6fzATH7iR2YRyS/8"
        b"zGyiuLQpCH4V5zKHefzGAubzB7+zkD9ZzCL+YgnLWMoKlrOKlaxhNetYy9+sZyMb+Aetg838y1a2sJ1t"
        b"7GQHu9nFXvawn30c5ACHOcRRjnCcY5zkBKc5xVnOcJ5zXOQCl6NnwFWu8B/XuM7/3OQGt7nFXe5wn3s8"
        b"5AGPecRTnvCcZ7zkBa95xVvevL+fsOAdffyELA=="
    )
)


def field(number, value):
    """One protobuf field: bytes with their length, or a small number."""
    if isinstance(value, bytes):
        size = len(value)
        length = bytes([size & 0x7F | 0x80, size >> 7]) if size > 127 else bytes([size])
        return bytes([number << 3 | 2]) + length + value
    return bytes([number << 3, value])


def piece(text, score, kind=1):
    body = field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + field(3, kind)
    return field(1, body)


@pytest.fixture
def written(tmp_path):
    """`written(charsmap, dummy_prefix, single_spaces)`: the tokenizer of such a model file."""
    user_defined = [("▁▁", 0.0, 4), ("▁▁▁", 0.0, 4), ("<tool>", 0.0, 4)]
    plain = [("▁a", -0.0, 1), ("▁", -1.0, 1), ("a", -2.0, 1), ("b", -3.0, 1), ("1", -4.0, 1)]
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *user_defined, *plain]

    def write(charsmap=b"", dummy_prefix=1, single_spaces=0):
        settings = field(2, charsmap) + field(3, dummy_prefix) + field(4, single_spaces)
        model = b"".join(piece(*entry) for entry in pieces)
        model += field(2, field(3, 2)) + field(3, settings)
        (tmp_path / "tokenizer.model").write_bytes(model)
        tokenizer = load_tokenizer(tmp_path)
        names = [text for text, *_ in pieces]
        return lambda text: [names[token] for token in tokenizer.encode(text)]

    return write


def test_runs_of_spaces_that_the_user_defined(written):
    cut = written(dummy_prefix=0)
    assert cut("b  b") == ["b", "▁▁", "b"]
    assert cut("b   b") == ["b", "▁▁▁", "b"]
    assert cut("b a") == ["b", "▁a"]
    assert cut("b<tool>b") == ["b", "<tool>", "b"]


def test_characters_are_replaced(written):
    assert written(CHARSMAP)("A① b") == ["▁a", "1", "▁", "b"]
    assert written()("A") == ["▁", "<unk>"]


def test_spaces_at_the_ends_and_repeated_ones_are_dropped(written):
    assert written(single_spaces=1)("  b   a  ") == ["▁", "b", "▁a"]
    assert written(dummy_prefix=0, single_spaces=1)(" b ") == ["b"]
