"""The few shapes that steps are compiled for, and the smallest one that a batch fits.

Decode buckets hold one token a row; mixed buckets hold prompts, alone or fused with decodes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SMALLEST_MIXED = 16
FEW_ROWS = 8

MANY_TOKENS = 256
"""Mixed steps of more tokens take so long that it does not matter for how many rows they compute
logits.
"""

MANY_ROWS = 64
"""From so many decodes on products and sampling take longer for more of them: here too sizes lie
closer together.
"""

FILLED_FROM = 256
"""Tokens from which a step's products take longer than reading the weights, roughly: below it a
padded step is as fast as a full one, from it on sizes lie closer together, and closer still from
twice as many on.
"""

SMALL_TABLE = 2**16
"""Entries, 256 KiB: to pack and send a larger block table costs a good part of a decode step."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shapes of one compiled step. Hashable, so that it can be a static argument of jit.

    tokens: of the flat batch, padding included. rows: sequences. blocks: width of the block tables.
    decode: every row has exactly one token.
    """

    tokens: int
    rows: int
    blocks: int
    decode: bool


class NoBucket(ValueError):
    """A batch is larger than the limits that the buckets were made for."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """All buckets of an engine, each kind from the smallest to the largest.

    row_alignment: each row's span of tokens begins at a multiple of it, and fills whole multiples.
    """

    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]
    row_alignment: int = 1

    @classmethod
    def for_limits(
        cls,
        *,
        max_tokens: int,
        max_rows: int,
        max_blocks: int,
        row_alignment: int = 1,
        smallest_mixed: int = SMALLEST_MIXED,
        short_blocks: int | None = None,
    ) -> "Buckets":
        """Buckets for batches of at most max_tokens tokens (padding not counted) and max_rows rows.

        Rows of decode buckets are powers of two, from 64 on also halfway between them, then
        max_rows: fewer than twice the rows needed.
        Where many rows of max_blocks make a large table there is one more, as wide as a small table
        allows: long contexts are the exception. Mixed steps take long enough to hide theirs.
        short_blocks: the widest table of one row that a faster kernel serves, which is a bucket of
        its own; None where there is no such kernel.
        Tokens of mixed buckets are powers of two from smallest_mixed, from 256 on also halfway
        between them and from 512 on at the first quarter, then the most that alignment can make of
        max_tokens: fewer than twice the tokens needed (spans aligned), or the smallest. Their rows
        are max_rows, and of powers of two up to 256 also 8.

        ValueError unless 1 <= max_rows <= max_tokens and the others are at least 1.
        """
        if not 1 <= max_rows <= max_tokens or max_blocks < 1 or row_alignment < 1:
            raise ValueError(
                "Buckets need 1 <= max_rows <= max_tokens, max_blocks >= 1 and row_alignment >= 1; "
                f"got {max_rows}, {max_tokens}, {max_blocks} and {row_alignment}."
            )
        decode = tuple(
            Bucket(rows * row_alignment, rows, blocks, decode=True)
            for rows in _sizes(1, max_rows, MANY_ROWS)
            for blocks in _widths(rows, max_blocks, short_blocks if rows == 1 else None)
        )
        padded = max_tokens + (row_alignment - 1) * max_rows
        most = padded // row_alignment * row_alignment
        smallest = -(-smallest_mixed // row_alignment) * row_alignment
        often = [size for size in _doubling(smallest, most) if size <= MANY_TOKENS]
        mixed = tuple(
            Bucket(tokens, rows, max_blocks, decode=False)
            for tokens in sorted(
                {
                    *_sizes(smallest, most, FILLED_FROM, align=row_alignment),
                    *_sizes(smallest, most, 2 * FILLED_FROM, 5, align=row_alignment),
                }
            )
            for rows in sorted(
                {
                    min(cap, tokens // row_alignment)
                    for cap in ((FEW_ROWS, max_rows) if tokens in often else (max_rows,))
                }
            )
            if rows <= max_rows
        )
        return cls(decode, mixed, row_alignment)

    @property
    def filled(self) -> tuple[int, ...]:
        """Sizes of mixed steps that are worth filling; none where spans are aligned."""
        if self.row_alignment > 1:
            return ()
        return tuple(sorted({b.tokens for b in self.mixed if b.tokens >= FILLED_FROM}))

    def __iter__(self) -> Iterator[Bucket]:
        """Every bucket, as warm-up compiles them."""
        yield from self.decode
        yield from self.mixed

    def fit(self, token_counts: Sequence[int], blocks: int | None = None) -> Bucket:
        """The smallest bucket for rows with these numbers of tokens. NoBucket if there is none.

        blocks: the most that one of them owns; None for any number.
        """
        rows = len(token_counts)
        if max(token_counts, default=1) == 1:
            tokens, kind = rows * self.row_alignment, self.decode
        else:
            align = self.row_alignment
            tokens, kind = sum(-(-count // align) * align for count in token_counts), self.mixed
        wanted = kind[-1].blocks if blocks is None else blocks
        for bucket in kind:
            if tokens <= bucket.tokens and rows <= bucket.rows and wanted <= bucket.blocks:
                return bucket
        raise NoBucket(
            f"{rows} rows with {tokens} tokens (spans aligned to {self.row_alignment}) exceed the "
            f"largest bucket, {kind[-1].rows} rows with {kind[-1].tokens} tokens."
        )


def _widths(rows: int, max_blocks: int, short_blocks: int | None) -> list[int]:
    """Of the block tables of so many rows."""
    narrow = SMALL_TABLE // rows, short_blocks or max_blocks
    return sorted({max_blocks, *(min(max_blocks, max(1, blocks)) for blocks in narrow)})


def _doubling(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first ... and `last`, which ends it. Just `last` if that is not larger."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def _sizes(first: int, last: int, many: int, quarters: int = 6, *, align: int = 1) -> list[int]:
    """_doubling, and from `many` on multiples of align at so many quarters of each."""
    sizes = _doubling(first, last)
    between = [size * quarters // 4 // align * align for size in sizes if size >= many]
    return sorted({*sizes, *(size for size in between if size < last)})
