"""Grouped products in plain JAX for any XLA device: only groups that have rows are touched.

Many rows: tiles of one group's rows each, one after another. A handful of rows on an accelerator:
each row reads its own weight, gather and product in one fused pass over the bytes.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import target_platform
from pallas_kernels.grouped_matmul.checks import GroupedProblem

_FEW_ROWS = 16
"""Up to here rows rarely share a group, so that reading a weight per row wastes little."""


def unsupported(problem: GroupedProblem) -> str | None:
    """The portable implementation serves everything."""
    del problem
    return None


def run(
    x: Float[Array, "rows in"],
    weight: Float[Array, "groups out in"],
    group_sizes: Int[Array, " groups"],
) -> Float[Array, "rows out"]:
    """As grouped_matmul."""
    if target_platform() != "cpu" and x.shape[0] <= _FEW_ROWS:
        return _row_by_row(x, weight, group_sizes)
    return _tile_by_tile(x, weight, group_sizes, _tile(x.shape[0], weight.shape[0]))


def _row_by_row(
    x: Float[Array, "rows in"],
    weight: Float[Array, "groups out in"],
    group_sizes: Int[Array, " groups"],
) -> Float[Array, "rows out"]:
    """A sum of products rather than a dot, which XLA fuses with the gather of the weights."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0], dtype=jnp.int32)
    group = (row[:, None] >= ends).sum(axis=1, dtype=jnp.int32)
    mine = weight.at[group].get(mode="clip").astype(jnp.float32)
    out = (x.astype(jnp.float32)[:, None, :] * mine).sum(axis=-1)
    return jnp.where((row < ends[-1])[:, None], out, 0).astype(x.dtype)


def _tile(rows: int, groups: int) -> int:
    """Rows of a tile: about what a group has on average, within what is worth a product."""
    average = -(-rows // groups)
    return min(rows, max(8, min(128, 1 << (average - 1).bit_length())))


# Jitted so that the unrolled layers of a model trace it once.
@jax.jit(static_argnames="tile")
def _tile_by_tile(
    x: Float[Array, "rows in"],
    weight: Float[Array, "groups out in"],
    group_sizes: Int[Array, " groups"],
    tile: int,
) -> Float[Array, "rows out"]:
    rows = x.shape[0]
    row_ends = jnp.cumsum(group_sizes)
    tiles = (group_sizes + tile - 1) // tile
    tile_ends = jnp.cumsum(tiles)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT

    def advance(index: Int[Array, ""], out: Array) -> Array:
        group = (index >= tile_ends).sum(dtype=jnp.int32)
        within = (index - tile_ends[group] + tiles[group]) * tile
        offset = within + jnp.arange(tile, dtype=jnp.int32)
        row = row_ends[group] - group_sizes[group] + offset
        row = jnp.where(offset < group_sizes[group], row, rows)
        found = lax.dot_general(
            x.at[row].get(mode="fill", fill_value=0),
            lax.dynamic_index_in_dim(weight, group, keepdims=False),
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return out.at[row].set(found.astype(x.dtype), mode="drop")

    out = jnp.zeros((rows, weight.shape[1]), x.dtype)
    return lax.fori_loop(0, tile_ends[-1], advance, out)
