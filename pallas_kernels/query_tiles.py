"""What attention in plain JAX shares: tiles of queries of one row each, and softmax online.

Only live tiles run, side by side in lanes, and each sees its own row's block table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import target_platform
from pallas_kernels.pages import RaggedRows

MASKED = -1e30  # finite, so that a fully masked block gives weights of zero and not NaN


@dataclass(frozen=True, slots=True)
class TilePlan:
    """tile: query tokens of a tile; lanes: tiles that advance together; blocks: pages per step."""

    tile: int
    lanes: int
    blocks: int


def tile_plan(
    tokens: int, rows: RaggedRows, page_size: int, *, cpu_tile: int, tile: int, lanes: int
) -> TilePlan:
    """Wide on accelerators, where one small operation costs as much as a large one.

    Lanes all advance to the furthest causal limit among them; on CPU, one lane wastes nothing.
    cpu_tile, tile, lanes: the most for prefill, on CPU and on accelerators.
    """
    on_cpu = target_platform() == "cpu"
    table_rows, table_blocks = rows.block_table.shape
    decode = tokens <= 2 * table_rows
    return TilePlan(
        tile=1 if decode else min(tokens, cpu_tile if on_cpu else tile),
        lanes=1 if on_cpu else min(tokens, 64 if decode else lanes),
        blocks=min(table_blocks, max(1, 256 // page_size)),
    )


class _Tiles(NamedTuple):
    """Query tiles side by side: row and first token (within the row's query) of each."""

    row: Int[Array, " lanes"]
    first: Int[Array, " lanes"]
    live: Bool[Array, " lanes"]


def attend_by_tiles(
    q: Float[Array, "tokens heads head"],
    rows: RaggedRows,
    plan: TilePlan,
    out: Float[Array, "tokens heads value"],
    attend: Callable[[Array, Array, Array], Array],
) -> Float[Array, "tokens heads value"]:
    """`out`, zeros at first, with the outputs of every row's query tokens.

    attend(queries [lanes, tile, heads, head], position [lanes, tile], table [lanes, blocks]) gives
    [lanes, tile, heads, value]; queries at position -1 are none, whatever comes of them is dropped.
    """
    tokens = q.shape[0]
    tiles = (rows.live_lengths() + plan.tile - 1) // plan.tile
    ends = jnp.cumsum(tiles)

    def advance(step: Int[Array, ""], out: Array) -> Array:
        chosen = _take_tiles(step * plan.lanes, plan, tiles, ends)
        offset = chosen.first[:, None] + jnp.arange(plan.tile, dtype=jnp.int32)
        valid = chosen.live[:, None] & (offset < rows.query_lengths[chosen.row][:, None])
        token = jnp.where(valid, rows.starts[chosen.row][:, None] + offset, tokens)
        position = (rows.kv_lengths - rows.query_lengths)[chosen.row][:, None] + offset
        queries = q.at[token].get(mode="fill", fill_value=0)
        found = attend(queries, jnp.where(valid, position, -1), rows.block_table[chosen.row])
        return out.at[token].set(found.astype(out.dtype), mode="drop")

    if plan.tile == 1 and plan.lanes == tokens:  # the one step there can be
        return advance(jnp.int32(0), out)
    return lax.fori_loop(0, (ends[-1] + plan.lanes - 1) // plan.lanes, advance, out)


def _take_tiles(
    start: Int[Array, ""], plan: TilePlan, tiles: Int[Array, " rows"], ends: Int[Array, " rows"]
) -> _Tiles:
    """The next tiles of the work list, which holds each row's tiles in the order of the rows."""
    item = start + jnp.arange(plan.lanes, dtype=jnp.int32)
    row = (item[:, None] >= ends).sum(axis=1, dtype=jnp.int32)
    live = item < ends[-1]
    row = jnp.where(live, row, 0)
    return _Tiles(row=row, first=(item - ends[row] + tiles[row]) * plan.tile, live=live)


class Softmax(NamedTuple):
    """Online softmax in float32: largest score, sum of weights, weighted values so far."""

    top: Float[Array, "... queries"]
    total: Float[Array, "... queries"]
    out: Float[Array, "... queries value"]

    def meet(
        self,
        scores: Float[Array, "... queries keys"],
        seen: Bool[Array, "... queries keys"],
        weigh: Callable[[Array], Array],
    ) -> "Softmax":
        """With more keys; weigh(weights [..., queries, keys]) gives their weighted values."""
        scores = jnp.where(seen, scores, MASKED)
        top = jnp.maximum(self.top, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
        fade = jnp.exp(self.top - top)
        return Softmax(
            top=top,
            total=self.total * fade + weights.sum(axis=-1),
            out=self.out * fade[..., None] + weigh(weights),
        )

    def result(self) -> Float[Array, "... queries value"]:
        """The weighted mean; zeros where nothing was seen."""
        return self.out / jnp.maximum(self.total, jnp.finfo(jnp.float32).tiny)[..., None]
