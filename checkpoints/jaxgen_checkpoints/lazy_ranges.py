"""Which ranges of an operand a slice of a result needs: the integer arithmetic of lazy tensors."""

from collections.abc import Iterator, Sequence

import numpy as np

type Box = tuple[tuple[int, int], ...]
"""One (start, stop) per axis; never empty once `LazyTensor.read` has let it through."""

MANY_READS = 32
"""Up to so many small reads are made before a large one that reads up to twice too much."""


def box_shape(box: Box) -> tuple[int, ...]:
    """Shape of the values in a box."""
    return tuple(stop - start for start, stop in box)


def replace_range[T](entries: tuple[T, ...], axis: int, entry: T) -> tuple[T, ...]:
    """`entries` (a shape or a box) with another entry for one axis."""
    return (*entries[:axis], entry, *entries[axis + 1 :])


def merged_pieces(
    bounds: tuple[int, int], inner: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Split a range of a merged axis into at most three (outer range, inner range) boxes.

    Example, 4..15 of rows of 6: 4..6 of row 0, all of row 1, 0..3 of row 2.
    """
    (first, start), (last, stop) = divmod(bounds[0], inner), divmod(bounds[1], inner)
    if first == last:
        yield (first, first + 1), (start, stop)
        return
    if start:
        yield (first, first + 1), (start, inner)
        first += 1
    if first < last:
        yield (first, last), (0, inner)
    if stop:
        yield (last, last + 1), (0, stop)


def gathered_ranges(
    wanted: np.ndarray,
) -> Iterator[tuple[tuple[int, int], slice | np.ndarray, np.ndarray | None]]:
    """Plan a gather of `wanted` indices, -1 for none: each range to read once, whole runs together.

    Yields (range of the operand, its places in the result, the order to take its rows in or None
    where they come as they are). Example, [4, 0, 1, -1]: range 0..2 at places 1..3, 4..5 at 0..1.
    """
    order = np.argsort(wanted, kind="stable")
    order = order[wanted[order] >= 0]
    if not order.size:
        return
    live = np.unique(wanted[order])
    starts = np.flatnonzero(np.diff(live, prepend=live[0] - 2) != 1)
    span = int(live[-1] + 1 - live[0])
    if len(starts) > max(MANY_READS, len(live) // 2) and span <= 2 * len(live):
        # Every other row, say: one read of twice the bytes beats very many small ones.
        starts = starts[:1]
    firsts = live[starts]
    lasts = live[np.append(starts[1:], len(live)) - 1]
    cuts = np.append(np.searchsorted(wanted[order], firsts), len(order))
    for first, last, low, high in zip(firsts, lasts, cuts[:-1], cuts[1:], strict=True):
        bounds = (int(first), int(last) + 1)
        places = order[low:high]
        rows = wanted[places] - first
        if _consecutive(places) and len(rows) == bounds[1] - bounds[0] and _consecutive(rows):
            yield bounds, slice(int(places[0]), int(places[-1]) + 1), None
        else:
            yield bounds, places, rows


def _consecutive(numbers: np.ndarray) -> bool:
    return bool((np.diff(numbers) == 1).all())


def assemble(axis: int, pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Join pieces along `axis`; a single piece is not copied."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)
