"""Latent attention in plain JAX for any XLA device: tiles of queries walk over their own blocks.

The step's queries are cut into tiles of one row each; only live tiles run, and each reads up to its
causal limit. All heads of a tile meet a block in one product. Softmax is online, in float32.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import target_platform
from pallas_kernels.latent_attention.checks import LatentProblem
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows

_MASKED = -1e30  # finite, so that a fully masked block gives weights of zero and not NaN


def unsupported(problem: LatentProblem) -> str | None:
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
    tile = 1 if decode else min(tokens, 32 if on_cpu else 16)
    lanes = 1 if on_cpu else min(tokens, 64 if decode else 8)
    return _Plan(tile=tile, lanes=lanes, blocks=min(table_blocks, max(1, 256 // page_size)))


class _Tiles(NamedTuple):
    """Query tiles side by side: row and first token (within the row's query) of each."""

    row: Int[Array, " lanes"]
    first: Int[Array, " lanes"]
    live: Bool[Array, " lanes"]


class _Softmax(NamedTuple):
    """Online softmax: largest score, sum of weights, weighted values so far."""

    top: Float[Array, "lanes queries"]
    total: Float[Array, "lanes queries"]
    out: Float[Array, "lanes queries latent"]


def run(
    q: Float[Array, "tokens heads width"],
    new: Float[Array, "tokens width"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    latent: int,
    scale: float,
) -> tuple[Float[Array, "tokens heads latent"], LatentPages]:
    """As latent_attention."""
    pages = pages.write(new, rows)
    plan = _plan(q.shape[0], rows.starts.shape[0], pages.page_size, rows.block_table.shape[1])
    return _attend(q, pages, rows, plan=plan, latent=latent, scale=scale), pages


# Jitted so that the unrolled layers of a model trace it once.
@partial(jax.jit, static_argnames=("plan", "latent", "scale"))
def _attend(
    q: Float[Array, "tokens heads width"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    plan: _Plan,
    latent: int,
    scale: float,
) -> Float[Array, "tokens heads latent"]:
    tokens, heads, _ = q.shape
    tiles = (rows.live_lengths() + plan.tile - 1) // plan.tile
    ends = jnp.cumsum(tiles)

    def advance(step: Int[Array, ""], out: Array) -> Array:
        chosen = _take_tiles(step * plan.lanes, plan, tiles, ends)
        offset = chosen.first[:, None] + jnp.arange(plan.tile, dtype=jnp.int32)
        valid = chosen.live[:, None] & (offset < rows.query_lengths[chosen.row][:, None])
        token = jnp.where(valid, rows.starts[chosen.row][:, None] + offset, tokens)
        position = (rows.kv_lengths - rows.query_lengths)[chosen.row][:, None] + offset
        found = _attend_tiles(
            q.at[token].get(mode="fill", fill_value=0),
            jnp.where(valid, position, -1),
            pages,
            rows.block_table[chosen.row],
            blocks=plan.blocks,
            latent=latent,
            scale=scale,
        )
        return out.at[token].set(found.astype(q.dtype), mode="drop")

    out = jnp.zeros((tokens, heads, latent), q.dtype)
    if plan.tile == 1 and plan.lanes == tokens:  # the one step there can be
        return advance(jnp.int32(0), out)
    return lax.fori_loop(0, (ends[-1] + plan.lanes - 1) // plan.lanes, advance, out)


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
    queries: Float[Array, "lanes tile heads width"],
    position: Int[Array, "lanes tile"],
    pages: LatentPages,
    table: Int[Array, "lanes blocks"],
    *,
    blocks: int,
    latent: int,
    scale: float,
) -> Float[Array, "lanes tile heads latent"]:
    """Attention of each tile over its row's tokens; queries at position -1 see nothing: zeros."""
    lanes, tile, heads, width = queries.shape
    span = blocks * pages.page_size
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else lax.Precision.DEFAULT
    scaled = (queries.astype(jnp.float32) * scale).reshape(lanes, tile * heads, width)
    at = jnp.repeat(position, heads, axis=1)[:, :, None]
    furthest = position.max(axis=1)

    def block(index: Int[Array, ""], so_far: _Softmax) -> _Softmax:
        column = index * blocks + jnp.arange(blocks, dtype=jnp.int32)
        keys = pages.read(table.at[:, column].get(mode="clip"))
        key_at = index * span + jnp.arange(span, dtype=jnp.int32)
        # Past the furthest query the pages may hold anything, NaN included.
        known = (key_at <= furthest[:, None])[:, :, None]
        keys = jnp.where(known, keys, 0).astype(jnp.float32)
        scores = jnp.einsum("lqw,lsw->lqs", scaled, keys, precision=precision)
        seen = key_at <= at
        scores = jnp.where(seen, scores, _MASKED)
        top = jnp.maximum(so_far.top, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
        added = jnp.einsum("lqs,lsc->lqc", weights, keys[:, :, :latent], precision=precision)
        fade = jnp.exp(so_far.top - top)
        return _Softmax(
            top=top,
            total=so_far.total * fade + weights.sum(axis=-1),
            out=so_far.out * fade[..., None] + added,
        )

    shape = (lanes, tile * heads)
    start = _Softmax(
        top=jnp.full(shape, _MASKED), total=jnp.zeros(shape), out=jnp.zeros((*shape, latent))
    )
    end = furthest.max() // span + 1  # position -1 everywhere: no block at all
    total = lax.fori_loop(0, end, block, start)
    out = total.out / jnp.maximum(total.total, jnp.finfo(jnp.float32).tiny)[..., None]
    return out.reshape(lanes, tile, heads, latent)
