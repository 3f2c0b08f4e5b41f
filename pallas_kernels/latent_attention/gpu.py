"""Latent attention on Hopper GPUs with Mosaic GPU: which kernel serves a step."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.hopper import SMS, wrong_device
from pallas_kernels.latent_attention.checks import LatentProblem
from pallas_kernels.latent_attention.gpu_decode import MOST_HEADS, DecodePlan, decode, decode_plan
from pallas_kernels.latent_attention.gpu_problem import LATENT, WIDTH, Problem
from pallas_kernels.latent_attention.gpu_tiles import TilePlan, attend_tiles, tile_heads, tile_plan
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows
from pallas_kernels.ragged_attention.gpu_schedule import BLOCK, Queries

_SHARED_MEMORY = 227 * 1024


def unsupported(problem: LatentProblem) -> str | None:
    """Why the Hopper kernels cannot serve this problem; None if they can."""
    wrong = wrong_device()
    if wrong is not None:
        return wrong
    if (problem.latent, problem.width) != (LATENT, WIDTH):
        return f"a latent of {problem.latent} of {problem.width}; they have {LATENT} of {WIDTH}"
    if problem.dtype not in (jnp.bfloat16, jnp.float16) or problem.page_dtype != problem.dtype:
        return "queries and pages must both be bfloat16 or both be float16"
    if problem.page_size % BLOCK:
        return f"the page size must be a multiple of {BLOCK}"
    return None


def run(
    q: Float[Array, "tokens heads width"],
    new: Float[Array, "tokens width"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    latent: int,
    scale: float,
    interpret: Any = None,
    plan: DecodePlan | TilePlan | None = None,
) -> tuple[Float[Array, "tokens heads latent"], LatentPages]:
    """As latent_attention. interpret: parameters of Mosaic GPU's interpreter, for tests."""
    pages = pages.write(new, rows)
    out = attend(q, pages, rows, latent=latent, scale=scale, interpret=interpret, plan=plan)
    return out, pages


def attend(
    q: Float[Array, "tokens heads width"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    latent: int = LATENT,
    scale: float,
    interpret: Any = None,
    plan: DecodePlan | TilePlan | None = None,
) -> Float[Array, "tokens heads latent"]:
    """The attention alone, over pages that hold the new tokens already."""
    del latent  # the kernels have one, which `unsupported` compared
    tokens, heads, _ = q.shape
    if plan is None:
        decodes = tokens <= rows.starts.shape[0] and heads <= MOST_HEADS
        plan = decode_plan(heads, SMS, _SHARED_MEMORY) if decodes else tile_plan(heads, SMS)
    decodes = isinstance(plan, DecodePlan)
    padded = -(-heads // 8) * 8 if decodes else tile_heads(heads)
    problem = Problem(padded, pages.page_size, q.dtype, scale, interpret)
    q = jnp.pad(q, ((0, 0), (0, padded - heads), (0, 0)))
    if isinstance(plan, TilePlan):
        return attend_tiles(q, pages, rows, problem, plan)[:, :heads]
    places = rows.token_places(tokens)
    queries = Queries(
        token=jnp.arange(tokens, dtype=jnp.int32),
        row=places.row,
        seen=jnp.where(places.valid, places.position + 1, 0),
    )
    return decode(q, pages, rows.block_table, queries, problem, plan)[:, :heads]
