"""Ragged attention in plain JAX for any XLA device: tiles of queries walk over their own KV blocks.

The step's queries are cut into tiles of one row each; only live tiles run, and each reads from its
window's start to its causal limit, never the whole block table. Softmax is online, in float32.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import target_platform
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.ragged_attention.checks import AttentionProblem

_MASKED = -1e30  # finite, so that a fully masked block gives weights of zero and not NaN


def unsupported(problem: AttentionProblem) -> str | None:
    """The portable implementation serves everything."""
    del problem
    return None


@dataclass(frozen=True, slots=True)
class _Plan:
    """tile: query tokens of a tile; lanes: tiles that advance together; blocks: pages per step."""

    tile: int
    lanes: int
    blocks: int


def _plan(tokens: int, rows: int, page_size: int, table_blocks: int) -> _Plan:
    """Wide on accelerators, where one small operation costs as much as a large one.

    Lanes all advance to the furthest causal limit among them; on CPU, one lane wastes nothing.
    """
    on_cpu = target_platform() == "cpu"
    decode = tokens <= 2 * rows
    tile = 1 if decode else min(tokens, 64 if on_cpu else 32)
    lanes = 1 if on_cpu else min(tokens, 64 if decode else 16)
    return _Plan(tile=tile, lanes=lanes, blocks=min(table_blocks, max(1, 256 // page_size)))


class _Tiles(NamedTuple):
    """Query tiles side by side: row and first token (within the row's query) of each."""

    row: Int[Array, " lanes"]
    first: Int[Array, " lanes"]
    live: Bool[Array, " lanes"]


class _Softmax(NamedTuple):
    """Online softmax: largest score, sum of weights, weighted values so far."""

    top: Float[Array, "lanes kv_heads queries"]
    total: Float[Array, "lanes kv_heads queries"]
    out: Float[Array, "lanes kv_heads queries head"]


def run(
    q: Float[Array, "tokens heads head"],
    k_new: Float[Array, "tokens kv_heads head"],
    v_new: Float[Array, "tokens kv_heads head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, "heads ..."] | None,
) -> tuple[Float[Array, "tokens heads head"], KVPages]:
    """As ragged_attention."""
    pages = pages.write(k_new, v_new, rows)
    plan = _plan(q.shape[0], rows.starts.shape[0], pages.page_size, rows.block_table.shape[1])
    out = _attend(
        q,
        pages,
        rows,
        sinks,
        alibi,
        plan=plan,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
    return out, pages


# Jitted so that the unrolled layers of a model trace it once.
@partial(jax.jit, static_argnames=("plan", "scale", "window", "soft_cap"))
def _attend(
    q: Float[Array, "tokens heads head"],
    pages: KVPages,
    rows: RaggedRows,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, "heads ..."] | None,
    *,
    plan: _Plan,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "tokens heads head"]:
    tokens = q.shape[0]
    tiles = (rows.live_lengths() + plan.tile - 1) // plan.tile
    ends = jnp.cumsum(tiles)

    def advance(step: Int[Array, ""], out: Array) -> Array:
        chosen = _take_tiles(step * plan.lanes, plan, tiles, ends)
        offset = chosen.first[:, None] + jnp.arange(plan.tile, dtype=jnp.int32)
        valid = chosen.live[:, None] & (offset < rows.query_lengths[chosen.row][:, None])
        token = jnp.where(valid, rows.starts[chosen.row][:, None] + offset, tokens)
        position = (rows.kv_lengths - rows.query_lengths)[chosen.row][:, None] + offset
        position = jnp.where(valid, position, -1)
        queries = q.at[token].get(mode="fill", fill_value=0)
        found = _attend_tiles(
            queries,
            position,
            pages,
            rows.block_table[chosen.row],
            blocks=plan.blocks,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi=alibi,
        )
        return out.at[token].set(found.astype(q.dtype), mode="drop")

    steps = (ends[-1] + plan.lanes - 1) // plan.lanes
    out = jnp.zeros_like(q)
    if plan.tile == 1 and plan.lanes == tokens:  # the one step there can be
        return advance(jnp.int32(0), out)
    return lax.fori_loop(0, steps, advance, out)


def _take_tiles(
    start: Int[Array, ""], plan: _Plan, tiles: Int[Array, " rows"], ends: Int[Array, " rows"]
) -> _Tiles:
    """The next tiles of the work list, which holds each row's tiles in the order of the rows."""
    item = start + jnp.arange(plan.lanes, dtype=jnp.int32)
    row = (item[:, None] >= ends).sum(axis=1, dtype=jnp.int32)
    live = item < ends[-1]
    row = jnp.where(live, row, 0)
    return _Tiles(row=row, first=(item - ends[row] + tiles[row]) * plan.tile, live=live)


def _attend_tiles(
    queries: Float[Array, "lanes tile heads head"],
    position: Int[Array, "lanes tile"],
    pages: KVPages,
    table: Int[Array, "lanes blocks"],
    *,
    blocks: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, "heads ..."] | None,
) -> Float[Array, "lanes tile heads head"]:
    """Attention of each tile over its row's KV; queries at position -1 see nothing: zeros."""
    lanes, tile, heads, head_dim = queries.shape
    group = heads // pages.kv_heads
    grouped = (lanes, pages.kv_heads, group, tile)
    span = blocks * pages.page_size
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else lax.Precision.DEFAULT

    scaled = queries.astype(jnp.float32) * scale
    scaled = jnp.moveaxis(scaled, 1, 2).reshape(lanes, pages.kv_heads, group * tile, head_dim)

    def per_query(per_head: Array) -> Array:
        spread = per_head.astype(jnp.float32).reshape(1, pages.kv_heads, group, 1)
        return jnp.broadcast_to(spread, grouped).reshape(lanes, pages.kv_heads, group * tile)

    at = jnp.broadcast_to(position[:, None, None, :], grouped)
    at = at.reshape(lanes, pages.kv_heads, group * tile, 1)
    furthest = position.max(axis=1)
    nearest = jnp.where(position >= 0, position, furthest.max()).min(axis=1)

    def bias(alibi: Array, key_at: Int[Array, " span"]) -> Array:
        if alibi.ndim == 1:
            return per_query(alibi)[..., None] * (key_at - at).astype(jnp.float32)
        here = alibi.astype(jnp.float32).at[:, key_at].get(mode="clip")
        here = here.reshape(pages.kv_heads, group, 1, span)
        return jnp.broadcast_to(here, (pages.kv_heads, group, tile, span)).reshape(
            pages.kv_heads, group * tile, span
        )

    def block(index: Int[Array, ""], so_far: _Softmax) -> _Softmax:
        column = index * blocks + jnp.arange(blocks, dtype=jnp.int32)
        keys, values = pages.read(table.at[:, column].get(mode="clip"))
        key_at = index * span + jnp.arange(span, dtype=jnp.int32)
        scores = jnp.einsum(
            "lkqd,lksd->lkqs", scaled, keys.astype(jnp.float32), precision=precision
        )
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if alibi is not None:
            scores += bias(alibi, key_at)
        seen = key_at <= at
        if window is not None:
            seen &= key_at > at - window
        scores = jnp.where(seen, scores, _MASKED)
        top = jnp.maximum(so_far.top, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
        # What no query sees lies in pages that may hold anything, NaN included.
        known = key_at <= furthest[:, None]
        if window is not None:
            known &= key_at > nearest[:, None] - window
        values = jnp.where(known[:, None, :, None], values, 0).astype(jnp.float32)
        added = jnp.einsum("lkqs,lksd->lkqd", weights, values, precision=precision)
        fade = jnp.exp(so_far.top - top)
        return _Softmax(
            top=top,
            total=so_far.total * fade + weights.sum(axis=-1),
            out=so_far.out * fade[..., None] + added,
        )

    shape = (lanes, pages.kv_heads, group * tile)
    start = _Softmax(
        top=jnp.full(shape, _MASKED) if sinks is None else per_query(sinks),
        total=jnp.zeros(shape) if sinks is None else jnp.ones(shape),
        out=jnp.zeros((*shape, head_dim)),
    )
    first = 0 if window is None else jnp.maximum(nearest.min() - window + 1, 0) // span
    end = furthest.max() // span + 1  # position -1 everywhere: no block at all
    total = lax.fori_loop(first, end, block, start)
    out = total.out / jnp.maximum(total.total, jnp.finfo(jnp.float32).tiny)[..., None]
    return jnp.moveaxis(out.reshape(*grouped, head_dim), 3, 1).reshape(queries.shape)
