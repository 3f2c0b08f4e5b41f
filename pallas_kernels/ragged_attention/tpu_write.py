"""The step's tokens into their pages, on TPU: whole slabs of rows, read, changed, written.

A tile of the memory holds several tokens, so that one token alone cannot be written. The smallest
piece that can be is a slab: so many tokens of one page as a tile has rows.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.pages import RaggedRows


def slab_rows(dtype: Any) -> int:
    """Tokens of one slab: rows of a tile of this type."""
    return 32 // jnp.dtype(dtype).itemsize


def most_slabs(tokens: int, rows: int, size: int) -> int:
    """Slabs of `size` tokens that a step may touch."""
    return tokens if tokens <= rows else tokens // size + 2 * rows


@dataclass(frozen=True, slots=True)
class _Slabs:
    """All int32 [slabs]: page, slab within it, rows [low, high) that are new, flat index of the
    token in row 0 (may be out of range); live []: how many slabs there are, the first ones.
    """

    page: Int[Array, " slabs"]
    part: Int[Array, " slabs"]
    low: Int[Array, " slabs"]
    high: Int[Array, " slabs"]
    token: Int[Array, " slabs"]
    live: Int[Array, ""]


def write(
    new: Float[Array, "tokens kv_heads lanes"],
    pool: Float[Array, "pages kv_heads page lanes"],
    rows: RaggedRows,
    *,
    interpret: Any = False,
) -> Float[Array, "pages kv_heads page lanes"]:
    """The pool with the step's tokens in it, updated in place where the caller donates it."""
    _, kv_heads, page_size, lanes = pool.shape
    size = slab_rows(pool.dtype)
    slabs = _slabs(rows, new.shape[0], page_size, size)
    index = slabs.token[:, None] + jnp.arange(size, dtype=jnp.int32)
    fresh = new[jnp.clip(index, 0, new.shape[0] - 1)].astype(pool.dtype).transpose(0, 2, 1, 3)

    def unit(i: Any, page: Any, part: Any, low: Any, high: Any, live: Any) -> tuple[Any, ...]:
        del page, part, low, high, live
        return (i, 0, 0, 0)

    def slab(i: Any, page: Any, part: Any, low: Any, high: Any, live: Any) -> tuple[Any, ...]:
        del low, high, live
        return (page[i], 0, part[i], 0)

    block = (1, kv_heads, size, lanes)
    held = pl.BlockSpec(block, slab)
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(slabs.page.shape[0],),
            in_specs=[pl.BlockSpec(block, unit), held],
            out_specs=held,
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="page_write",
    )(slabs.page, slabs.part, slabs.low, slabs.high, slabs.live[None], fresh, pool)


def _slabs(rows: RaggedRows, tokens: int, page_size: int, size: int) -> _Slabs:
    lengths = rows.live_lengths()
    count = lengths.shape[0]
    start = rows.kv_lengths - lengths
    pieces = jnp.where(lengths > 0, (start + lengths - 1) // size - start // size + 1, 0)
    ends = jnp.cumsum(pieces)
    live = ends[-1].astype(jnp.int32)
    # Slabs past the last live one name it again, so that nothing else is fetched or written.
    most = most_slabs(tokens, count, size)
    index = jnp.minimum(jnp.arange(most, dtype=jnp.int32), jnp.maximum(live - 1, 0))
    row = jnp.minimum((index[:, None] >= ends).sum(axis=1), count - 1).astype(jnp.int32)
    number = start[row] // size + index - (ends - pieces)[row]
    page = rows.block_table[row, number * size // page_size]
    return _Slabs(
        page=jnp.where(live > 0, page, 0),
        part=jnp.where(live > 0, number % (page_size // size), 0),
        low=jnp.maximum(start[row] - number * size, 0),
        high=jnp.where(live > 0, jnp.minimum((start + lengths)[row] - number * size, size), 0),
        token=rows.starts[row] + number * size - start[row],
        live=live,
    )


def _kernel(
    page: Any, part: Any, low: Any, high: Any, live: Any, new: Any, old: Any, out: Any
) -> None:
    del page, part
    i = pl.program_id(0)

    # A slab that is named again is in the buffer with its new rows: it must stay as it is.
    @pl.when((i < live[0]) | (i == 0))
    def _() -> None:
        row = lax.broadcasted_iota(jnp.int32, out.shape[2:], 0)
        out[0] = jnp.where((row >= low[i]) & (row < high[i]), new[0], old[0])
