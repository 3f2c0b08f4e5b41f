"""What the Hopper kernels share: one tile of scores becomes weights, online, in registers.

Scores are kept in units of log2, so that a weight is one multiply-add and one exp2.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # rows of one warpgroup's matrix tile
# A power of two: its product with any factor is exact, so that a fused multiply-add of a row which
# sees nothing yet cancels to zero, not to a rounding error of 1e22 (whose power is infinite).
MASKED = -(2.0**100)
LOG2E = math.log2(math.e)
TILE = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def swizzled(rows: int, columns: int, dtype: Any, count: tuple[int, ...] = ()) -> Any:
    """Shared memory tiles that the matrix unit reads, with the widest swizzle that fits a row."""
    size = jnp.dtype(dtype).itemsize
    bytes_ = next(each for each in (128, 64, 32) if columns * size % each == 0)
    transforms = (plgpu.TilingTransform((8, bytes_ // size)), plgpu.SwizzleTransform(bytes_))
    return plgpu.SMEM((*count, rows, columns), dtype, transforms=transforms)


def row_vector(value: float) -> jax.Array:
    """One float32 a row."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), PER_ROW)


def spread(per_row: jax.Array, columns: int) -> jax.Array:
    """The same value in all columns of a row."""
    return lax.broadcast_in_dim(per_row, (ROWS, columns), [0])


def across(ref: Any, columns: int) -> jax.Array:
    """A stored vector of one number a column, in all rows, float32."""
    vector = plgpu.load(ref, layout=PER_COLUMN, optimized=False).astype(jnp.float32)
    return lax.broadcast_in_dim(vector, (ROWS, columns), [1])


class Softmax(NamedTuple):
    """Online softmax of a tile: weighted values, largest score, sum of weights."""

    out: jax.Array
    top: jax.Array
    total: jax.Array


def fresh(head_dim: int) -> Softmax:
    """Nothing seen yet."""
    out = plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), TILE)
    return Softmax(out=out, top=row_vector(MASKED), total=row_vector(0.0))


def scores(queries: Any, keys: Any, block: int) -> jax.Array:
    """queries [ROWS, head] times keys [block, head] transposed, both in shared memory, float32."""

    def product(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, queries, keys.transpose((1, 0)))
        return accumulator[...]

    return pl.run_scoped(product, plgpu.ACC((ROWS, block), jnp.float32))


def to_log2(
    raw: jax.Array,
    scale: float,
    soft_cap: float | None,
    bias: Callable[[], jax.Array] | None,
) -> tuple[jax.Array, float]:
    """Scores and the factor that takes them to units of log2: capped, bias (in units of e) added.

    Where nothing but the factor is to be applied, it is left to the multiply-add of `advance`.
    """
    if soft_cap is None and bias is None:
        return raw, scale * LOG2E
    if soft_cap is None:
        value = raw * (scale * LOG2E)
    else:
        value = jnp.tanh(raw * (scale / soft_cap)) * (soft_cap * LOG2E)
    return (value if bias is None else value + bias() * LOG2E), 1.0


def advance(state: Softmax, value: jax.Array, factor: float) -> tuple[jax.Array, Softmax]:
    """Weights of a tile of scores, and the state with out and total faded to the new top."""
    top = jnp.maximum(state.top, value.max(axis=1) * factor)
    fade = jnp.exp2(state.top - top)
    weights = jnp.exp2(value * factor - spread(top, value.shape[1]))
    total = state.total * fade + weights.sum(axis=1)
    out = state.out * spread(fade, state.out.shape[1])
    return weights, Softmax(out=out, top=top, total=total)


def accumulate(out: jax.Array, weights: jax.Array, values: Any, interpret: bool) -> jax.Array:
    """out + weights [ROWS, block] (registers) times values [block, head] (shared memory)."""
    return accumulate_all(out, ((weights, values),), interpret)


def accumulate_all(
    out: jax.Array, pairs: tuple[tuple[jax.Array, Any], ...], interpret: bool
) -> jax.Array:
    """As `accumulate`, of several weights and values at once."""
    if interpret:  # the interpreter has no rule for matrix products with a register operand
        for weights, values in pairs:
            out = out + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return out

    def product(accumulator: Any) -> None:
        for weights, values in pairs:
            plgpu.wgmma(accumulator, weights, values)

    return pl.run_state(product)(plgpu.ACC.init(out))


def clear_rows_from(values: Any, first: jax.Array, block: int, head_dim: int) -> None:
    """Zero the rows of values [block, head] past the end of a sequence: they may hold NaN."""

    @pl.when(first < block)
    def _clear() -> None:
        loaded = plgpu.load(values, layout=TILE)
        row = plgpu.broadcasted_iota(jnp.int32, (block, head_dim), 0, layout=TILE)
        values[...] = jnp.where(row < first, loaded, jnp.zeros_like(loaded))
        plgpu.commit_smem()
