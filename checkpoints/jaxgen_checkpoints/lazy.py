"""A tensor described before it is read: a small pure algebra of reshapes, gathers and joins.

Nothing is read until `read` asks for a slice of the result; then each operation asks its operands
only for the ranges that this slice needs, down to the source.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jaxgen_checkpoints.lazy_ranges import (
    Box,
    assemble,
    box_shape,
    gathered_ranges,
    merged_pieces,
    replace_range,
)
from jaxgen_checkpoints.source import TensorInfo, TensorSource, printable_name, slice_bounds


class LazyTensor:
    """A tensor of known `shape` and `dtype` whose values are computed slice by slice.

    Immutable. Every operation returns a new description and costs nothing.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape = tuple(int(size) for size in shape)
        self.dtype = np.dtype(dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, from {self.source_names})"

    @property
    def sources(self) -> frozenset[str]:
        """Names of the source tensors it is made of."""
        return frozenset(leaf.info.name for leaf in self.leaves())

    @property
    def source_names(self) -> str:
        """`sources` in one line, for messages."""
        return ", ".join(printable_name(name) for name in sorted(self.sources))

    def leaves(self) -> Iterator["SourceTensor"]:
        """The source tensors it is made of, in the order in which they were joined."""
        for operand in self._operands():
            yield from operand.leaves()

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Compute `self[index]`: one slice of step 1 per axis. Reads only what the slice needs."""
        box = slice_bounds(type(self).__name__, self.shape, index)
        if 0 in box_shape(box):
            return np.empty(box_shape(box), self.dtype)
        return self.read_box(box)

    def read_all(self) -> np.ndarray:
        """Compute the whole tensor."""
        return self.read((slice(None),) * len(self.shape))

    def split(self, axis: int, sizes: Sequence[int]) -> "LazyTensor":
        """Split `axis` into axes of `sizes`, whose product must be its size."""
        axis = self._axis(axis)
        if math.prod(sizes) != self.shape[axis]:
            raise ValueError(
                f"axis {axis} of {self!r} has size {self.shape[axis]}, "
                f"not the product of {list(sizes)}"
            )
        result: LazyTensor = self
        for i in range(len(sizes) - 1):
            result = _Split(result, axis + i, int(sizes[i]), math.prod(sizes[i + 1 :]))
        return result

    def merge(self, axis: int, count: int = 2) -> "LazyTensor":
        """Merge `count` axes, `axis` the first of them, into one."""
        axis = self._axis(axis)
        if count < 1 or axis + count > len(self.shape):
            raise ValueError(f"cannot merge {count} axes from axis {axis} of {self!r}")
        result: LazyTensor = self
        for i in range(count - 2, -1, -1):
            result = _Merged(result, axis + i)
        return result

    def transpose(self, *perm: int) -> "LazyTensor":
        """Reorder the axes as `numpy.transpose` does."""
        if sorted(perm) != list(range(len(self.shape))):
            raise ValueError(f"{perm} is not a permutation of the axes of {self!r}")
        return _Transposed(self, tuple(perm))

    def take(self, axis: int, indices: np.ndarray) -> "LazyTensor":
        """Gather `indices` [n] along `axis`; index -1 gives zeros."""
        axis = self._axis(axis)
        indices = np.asarray(indices, np.int64)
        if indices.ndim != 1:
            raise ValueError(f"expected a vector of indices, got shape {list(indices.shape)}")
        if indices.size and not -1 <= indices.min() <= indices.max() < self.shape[axis]:
            raise ValueError(
                f"expected indices from -1 to {self.shape[axis] - 1} for axis {axis} of {self!r}, "
                f"got {indices.min()} to {indices.max()}"
            )
        if isinstance(self, _Taken) and self.axis == axis:
            # Gather once, from the operand: runs that the first gather broke may be whole again.
            return _Taken(self.base, axis, np.where(indices < 0, -1, self.indices[indices]))
        return _Taken(self, axis, indices)

    def map(self, fn: Callable[[np.ndarray], np.ndarray], dtype: np.dtype) -> "LazyTensor":
        """Apply elementwise `fn`, which must keep the shape and return `dtype`."""
        return _Mapped(self, fn, dtype)

    def read_box(self, box: Box) -> np.ndarray:
        """Compute the values in a box that is not empty; the operation's own business."""
        raise NotImplementedError

    def _operands(self) -> Sequence["LazyTensor"]:
        raise NotImplementedError

    def _axis(self, axis: int) -> int:
        if not -len(self.shape) <= axis < len(self.shape):
            raise ValueError(f"axis {axis} is out of range for {self!r}")
        return axis % len(self.shape)


class SourceTensor(LazyTensor):
    """A tensor as its source holds it."""

    def __init__(self, info: TensorInfo, source: TensorSource) -> None:
        super().__init__(info.shape, info.dtype)
        self.info = info
        self._source = source

    @property
    def source_names(self) -> str:
        """`sources` in one line, for messages."""
        return ", ".join(printable_name(name) for name in sorted(self.sources))

    def leaves(self) -> Iterator["SourceTensor"]:
        yield self

    def read_box(self, box: Box) -> np.ndarray:
        return self._source.read(self.info.name, tuple(slice(*bounds) for bounds in box))


def lazy(info: TensorInfo, source: TensorSource) -> LazyTensor:
    """Describe one tensor of a source."""
    return SourceTensor(info, source)


def concat(axis: int, parts: Sequence[LazyTensor]) -> LazyTensor:
    """Join along an existing axis. Different float types meet in the type that holds both."""
    first = parts[0]
    axis = first._axis(axis)
    for part in parts[1:]:
        if replace_range(part.shape, axis, 0) != replace_range(first.shape, axis, 0):
            raise ValueError(f"cannot join {first!r} and {part!r} along axis {axis}")
    return _Concatenated(axis, tuple(parts))


def stack(axis: int, parts: Sequence[LazyTensor]) -> LazyTensor:
    """Join along a new axis."""
    return concat(axis, [_NewAxis(part, axis % (len(part.shape) + 1)) for part in parts])


class _Unary(LazyTensor):
    def __init__(
        self, base: LazyTensor, shape: tuple[int, ...], dtype: np.dtype | None = None
    ) -> None:
        super().__init__(shape, base.dtype if dtype is None else dtype)
        self.base = base

    def _operands(self) -> Sequence[LazyTensor]:
        return (self.base,)


class _Split(_Unary):
    def __init__(self, base: LazyTensor, axis: int, outer: int, inner: int) -> None:
        super().__init__(base, (*base.shape[:axis], outer, inner, *base.shape[axis + 1 :]))
        self.axis = axis

    def read_box(self, box: Box) -> np.ndarray:
        axis, inner = self.axis, self.shape[self.axis + 1]
        (outer_start, outer_stop), (start, stop) = box[axis], box[axis + 1]
        rest = (*box[:axis], *box[axis + 2 :])
        # Whole rows of `inner` are one range; parts of them are a range each, unless they are most
        # of the bytes anyway.
        if 2 * (stop - start) > inner or outer_stop - outer_start == 1:
            whole = outer_stop - outer_start > 1
            low, high = (0, inner) if whole else (start, stop)
            bounds = (outer_start * inner + low, (outer_stop - 1) * inner + high)
            values = self.base.read_box((*rest[:axis], bounds, *rest[axis:]))
            shape = (outer_stop - outer_start, high - low)
            values = values.reshape(*values.shape[:axis], *shape, *values.shape[axis + 1 :])
            window = slice(start - low, stop - low)
            return values[(slice(None),) * (axis + 1) + (window,)]
        shape = box_shape(box)
        values = np.empty(shape, self.dtype)
        for i in range(outer_start, outer_stop):
            bounds = (i * inner + start, i * inner + stop)
            place = (slice(None),) * axis + (i - outer_start,)
            values[place] = self.base.read_box((*rest[:axis], bounds, *rest[axis:]))
        return values


class _Merged(_Unary):
    def __init__(self, base: LazyTensor, axis: int) -> None:
        size = base.shape[axis] * base.shape[axis + 1]
        super().__init__(base, (*base.shape[:axis], size, *base.shape[axis + 2 :]))
        self.axis = axis

    def read_box(self, box: Box) -> np.ndarray:
        axis = self.axis
        pieces = []
        for outer, inner in merged_pieces(box[axis], self.base.shape[axis + 1]):
            values = self.base.read_box((*box[:axis], outer, inner, *box[axis + 1 :]))
            pieces.append(values.reshape(*values.shape[:axis], -1, *values.shape[axis + 2 :]))
        return assemble(axis, pieces)


class _Transposed(_Unary):
    def __init__(self, base: LazyTensor, perm: tuple[int, ...]) -> None:
        super().__init__(base, tuple(base.shape[axis] for axis in perm))
        self.perm = perm

    def read_box(self, box: Box) -> np.ndarray:
        inverse = np.argsort(self.perm)
        return self.base.read_box(tuple(box[axis] for axis in inverse)).transpose(self.perm)


class _Taken(_Unary):
    def __init__(self, base: LazyTensor, axis: int, indices: np.ndarray) -> None:
        super().__init__(base, replace_range(base.shape, axis, len(indices)))
        self.axis = axis
        self.indices = indices

    def read_box(self, box: Box) -> np.ndarray:
        axis = self.axis
        wanted = self.indices[slice(*box[axis])]
        values = None
        for bounds, places, order in gathered_ranges(wanted):
            part = self.base.read_box(replace_range(box, axis, bounds))
            part = part if order is None else np.take(part, order, axis)
            if isinstance(places, slice) and places.stop - places.start == len(wanted):
                return part
            if values is None:
                values = np.zeros(box_shape(box), self.dtype)
            values[(slice(None),) * axis + (places,)] = part
        return np.zeros(box_shape(box), self.dtype) if values is None else values


class _Mapped(_Unary):
    def __init__(
        self, base: LazyTensor, fn: Callable[[np.ndarray], np.ndarray], dtype: np.dtype
    ) -> None:
        super().__init__(base, base.shape, dtype)
        self.fn = fn

    def read_box(self, box: Box) -> np.ndarray:
        return self.fn(self.base.read_box(box))


class _NewAxis(_Unary):
    def __init__(self, base: LazyTensor, axis: int) -> None:
        super().__init__(base, (*base.shape[:axis], 1, *base.shape[axis:]))
        self.axis = axis

    def read_box(self, box: Box) -> np.ndarray:
        inner = (*box[: self.axis], *box[self.axis + 1 :])
        return np.expand_dims(self.base.read_box(inner), self.axis)


class _Concatenated(LazyTensor):
    def __init__(self, axis: int, parts: tuple[LazyTensor, ...]) -> None:
        self.offsets = np.cumsum([0, *(part.shape[axis] for part in parts)])
        dtype = np.dtype(functools.reduce(jnp.promote_types, (part.dtype for part in parts)))
        super().__init__(replace_range(parts[0].shape, axis, self.offsets[-1]), dtype)
        self.axis = axis
        self.parts = parts

    def _operands(self) -> Sequence[LazyTensor]:
        return self.parts

    def read_box(self, box: Box) -> np.ndarray:
        start, stop = box[self.axis]
        pieces = []
        for part, offset in zip(self.parts, self.offsets, strict=False):
            low, high = max(start - offset, 0), min(stop - offset, part.shape[self.axis])
            if low < high:
                values = part.read_box(replace_range(box, self.axis, (int(low), int(high))))
                pieces.append(values.astype(self.dtype, copy=False))
        return assemble(self.axis, pieces)
