"""The collectives of a sharded layer, by the name of the mesh axis they run over.

A whole step runs inside one shard_map, so each module sees its own shard and says itself where
partial results are added up. Over an axis of size one both compile to nothing.
"""

from typing import Any, Final

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

TENSOR_AXIS: Final = "tensor"
EXPERT_AXIS: Final = "expert"


def axes_dividing(weight: Any, axis: int) -> tuple[str, ...]:  # noqa: ANN401
    """The mesh axes that an axis of a weight is divided over, the slowest first.

    weight: an array that has been placed, or the shape that stands for it, not a shard within a
    step: there nothing says any more where it lies.
    """
    sharding = weight.sharding
    entries = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    entry = entries[axis] if axis < len(entries) else None
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def sum_shards(partial: Float[Array, "..."]) -> Float[Array, "..."]:
    """Adds up the partial results of a row-parallel product."""
    return jax.lax.psum(partial, TENSOR_AXIS)


def sum_experts(partial: Float[Array, "..."]) -> Float[Array, "..."]:
    """Adds up what the experts of each shard have contributed."""
    return jax.lax.psum(partial, EXPERT_AXIS)


def gather_last_axis(local: Float[Array, "..."]) -> Float[Array, "..."]:
    """Joins every shard's part of the last axis, in shard order."""
    return jax.lax.all_gather(local, TENSOR_AXIS, axis=local.ndim - 1, tiled=True)
