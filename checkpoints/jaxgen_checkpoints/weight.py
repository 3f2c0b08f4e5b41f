"""A finished weight, described: what it is on one device, and how it is laid on this mesh."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.typing import DTypeLike

from jaxgen_checkpoints.lazy import LazyTensor


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One weight of the model before any of its bytes is read.

    tensor: the canonical layout, which no mesh has shaped: no padding, no copies. axes: a
    logical name per axis (None: never divided), for sharding. placement: axis -> gather indices
    into the canonical axis, -1 for zeros: the padding and the copies
      of KV heads that this mesh needs. Axes that need neither are absent.
    kept: the type that it is loaded in whatever the others are cast to; None for most.
    """

    tensor: LazyTensor
    axes: tuple[str | None, ...]
    placement: Mapping[int, np.ndarray]
    kept: np.dtype | None = None

    def loaded_dtype(self, dtype: DTypeLike) -> np.dtype:
        """The type it is loaded in where weights are cast to `dtype`."""
        return np.dtype(dtype) if self.kept is None else self.kept

    @property
    def shape(self) -> tuple[int, ...]:
        """The placed shape, over all devices."""
        sizes = enumerate(self.tensor.shape)
        return tuple(len(self.placement[i]) if i in self.placement else n for i, n in sizes)

    def placed(self) -> LazyTensor:
        """The tensor as it is laid on the mesh: the canonical one, gathered along each axis."""
        tensor = self.tensor
        for axis, indices in self.placement.items():
            tensor = tensor.take(axis, indices)
        return tensor
