"""Latent attention in plain JAX for any XLA device: tiles of queries walk over their own blocks.

The step's queries are cut into tiles of one row each; only live tiles run, and each reads up to its
causal limit. All heads of a tile meet a block in one product. Softmax is online, in float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.latent_attention.checks import LatentProblem
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows
from pallas_kernels.query_tiles import MASKED, Softmax, TilePlan, attend_by_tiles, tile_plan


def unsupported(problem: LatentProblem) -> str | None:
    """The portable implementation serves everything."""
    del problem
    return None


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
    return attend(q, pages, rows, latent=latent, scale=scale), pages


def attend(
    q: Float[Array, "tokens heads width"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    latent: int,
    scale: float,
) -> Float[Array, "tokens heads latent"]:
    """The attention alone, over pages that hold the new tokens already."""
    plan = tile_plan(q.shape[0], rows, pages.page_size, cpu_tile=32, tile=16, lanes=8)
    return _attend(q, pages, rows, plan=plan, latent=latent, scale=scale)


# Jitted so that the unrolled layers of a model trace it once.
@partial(jax.jit, static_argnames=("plan", "latent", "scale"))
def _attend(
    q: Float[Array, "tokens heads width"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    plan: TilePlan,
    latent: int,
    scale: float,
) -> Float[Array, "tokens heads latent"]:
    def attend_some(queries: Array, position: Array, table: Array) -> Array:
        return _attend_tiles(
            queries, position, pages, table, blocks=plan.blocks, latent=latent, scale=scale
        )

    out = jnp.zeros((*q.shape[:2], latent), q.dtype)
    return attend_by_tiles(q, rows, plan, out, attend_some)


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

    def block(index: Int[Array, ""], so_far: Softmax) -> Softmax:
        column = index * blocks + jnp.arange(blocks, dtype=jnp.int32)
        keys = pages.read(table.at[:, column].get(mode="clip"))
        key_at = index * span + jnp.arange(span, dtype=jnp.int32)
        # Past the furthest query the pages may hold anything, NaN included.
        known = (key_at <= furthest[:, None])[:, :, None]
        keys = jnp.where(known, keys, 0).astype(jnp.float32)
        scores = jnp.einsum("lqw,lsw->lqs", scaled, keys, precision=precision)
        values = keys[:, :, :latent]
        return so_far.meet(
            scores,
            key_at <= at,
            lambda weights: jnp.einsum("lqs,lsc->lqc", weights, values, precision=precision),
        )

    shape = (lanes, tile * heads)
    start = Softmax(
        top=jnp.full(shape, MASKED), total=jnp.zeros(shape), out=jnp.zeros((*shape, latent))
    )
    end = furthest.max() // span + 1  # position -1 everywhere: no block at all
    out = lax.fori_loop(0, end, block, start).result()
    return out.reshape(lanes, tile, heads, latent)
