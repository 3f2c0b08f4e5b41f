"""The collectives of a sharded layer, by the name of the mesh axis they run over.

A whole step runs inside one shard_map, so each module sees its own shard and says itself where
partial results are added up. Over an axis of size one both compile to nothing.
"""

from typing import Final

import jax
from jaxtyping import Array, Float

TENSOR_AXIS: Final = "tensor"
EXPERT_AXIS: Final = "expert"


def sum_shards(partial: Float[Array, "..."]) -> Float[Array, "..."]:
    """Adds up the partial results of a row-parallel product."""
    return jax.lax.psum(partial, TENSOR_AXIS)


def sum_experts(partial: Float[Array, "..."]) -> Float[Array, "..."]:
    """Adds up what the experts of each shard have contributed."""
    return jax.lax.psum(partial, EXPERT_AXIS)


def gather_last_axis(local: Float[Array, "..."]) -> Float[Array, "..."]:
    """Joins every shard's part of the last axis, in shard order."""
    return jax.lax.all_gather(local, TENSOR_AXIS, axis=local.ndim - 1, tiled=True)
