"""Which ranges of an operand a slice of a result needs: the integer arithmetic of lazy tensors."""

from collections.abc import Iterator, Sequence

import numpy as np

type Box = tuple[tuple[int, int], ...]
"""One (start, stop) per axis; never empty once `LazyTensor.read` has let it through."""


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


def runs(indices: np.ndarray) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Yield (places in the result, range of the operand) for each run of consecutive indices."""
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    for start, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(indices)], strict=True):
        # A break never falls between -1 and 0, which do follow each other.
        first = start + (indices[start] < 0)
        if first < stop and indices[first] >= 0:
            yield slice(first, stop), (int(indices[first]), int(indices[stop - 1]) + 1)


def covering_range(indices: np.ndarray) -> tuple[int, int] | None:
    """Return one range to read for all indices >= 0; None where it would read over twice too much.

    Most of what it covers is wanted, so that one large read beats many small ones.
    """
    live = np.unique(indices[indices >= 0])
    if not live.size:
        return None
    low, high = int(live[0]), int(live[-1]) + 1
    return (low, high) if high - low <= 2 * live.size else None


def assemble(axis: int, pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Join pieces along `axis`; a single piece is not copied."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)
