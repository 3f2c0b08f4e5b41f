"""Ragged attention in plain JAX for any XLA device: tiles of queries walk over their own KV blocks.

The step's queries are cut into tiles of one row each; only live tiles run, and each reads from its
window's start to its causal limit, never the whole block table. Softmax is online, in float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.query_tiles import MASKED, Softmax, TilePlan, attend_by_tiles, tile_plan
from pallas_kernels.ragged_attention.checks import AttentionProblem


def unsupported(problem: AttentionProblem) -> str | None:
    """The portable implementation serves everything."""
    del problem
    return None


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
    options = {"window": window, "soft_cap": soft_cap, "sinks": sinks, "alibi": alibi}
    return attend(q, pages, rows, scale=scale, **options), pages


def attend(
    q: Float[Array, "tokens heads head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, "heads ..."] | None,
) -> Float[Array, "tokens heads head"]:
    """The attention alone, over pages that hold the new tokens already."""
    plan = tile_plan(q.shape[0], rows, pages.page_size, cpu_tile=64, tile=32, lanes=16)
    options = {"plan": plan, "scale": scale, "window": window, "soft_cap": soft_cap}
    return _attend(q, pages, rows, sinks, alibi, **options)


# Jitted so that the unrolled layers of a model trace it once.
@partial(jax.jit, static_argnames=("plan", "scale", "window", "soft_cap"))
def _attend(
    q: Float[Array, "tokens heads head"],
    pages: KVPages,
    rows: RaggedRows,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, "heads ..."] | None,
    *,
    plan: TilePlan,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "tokens heads head"]:
    def attend_some(queries: Array, position: Array, table: Array) -> Array:
        return _attend_tiles(
            queries,
            position,
            pages,
            table,
            blocks=plan.blocks,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi=alibi,
        )

    return attend_by_tiles(q, rows, plan, jnp.zeros_like(q), attend_some)


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

    def block(index: Int[Array, ""], so_far: Softmax) -> Softmax:
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
        # What no query sees lies in pages that may hold anything, NaN included.
        known = key_at <= furthest[:, None]
        if window is not None:
            known &= key_at > nearest[:, None] - window
        values = jnp.where(known[:, None, :, None], values, 0).astype(jnp.float32)
        return so_far.meet(
            scores,
            seen,
            lambda weights: jnp.einsum("lkqs,lksd->lkqd", weights, values, precision=precision),
        )

    shape = (lanes, pages.kv_heads, group * tile)
    start = Softmax(
        top=jnp.full(shape, MASKED) if sinks is None else per_query(sinks),
        total=jnp.zeros(shape) if sinks is None else jnp.ones(shape),
        out=jnp.zeros((*shape, head_dim)),
    )
    first = 0 if window is None else jnp.maximum(nearest.min() - window + 1, 0) // span
    end = furthest.max() // span + 1  # position -1 everywhere: no block at all
    out = lax.fori_loop(first, end, block, start).result()
    return jnp.moveaxis(out.reshape(*grouped, head_dim), 3, 1).reshape(queries.shape)
