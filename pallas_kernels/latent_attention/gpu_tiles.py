"""Latent attention on Hopper by tiles of 64 (token, head) rows: many heads, or many query tokens.

Four warpgroups pass the work on. Two score, every other block each, which they also load; two
attend all blocks, each over its half of the channels of the value. So the softmax of a block runs
under the scores of the next and the values of the one before. The tiles' blocks are one line, cut
evenly over the SMs, as in decode.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.latent_attention.gpu_combine import combine_tiles
from pallas_kernels.latent_attention.gpu_problem import LATENT, WIDTH, Problem
from pallas_kernels.latent_attention.gpu_runs import even_runs
from pallas_kernels.latent_attention.gpu_tile_attend import attend
from pallas_kernels.latent_attention.gpu_tile_memory import scratch
from pallas_kernels.latent_attention.gpu_tile_score import score
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows
from pallas_kernels.ragged_attention.gpu_schedule import Queries
from pallas_kernels.ragged_attention.gpu_softmax import ROWS


@dataclass(frozen=True, slots=True)
class TilePlan:
    """workers: blocks of threads for each 64 heads of a token."""

    workers: int


def tile_plan(heads: int, sms: int) -> TilePlan:
    """All SMs, side by side where a token's heads take more than one tile."""
    return TilePlan(workers=max(sms // -(-heads // ROWS), 1))


def tile_heads(heads: int) -> int:
    """Heads with padding: such that tokens fill a tile, or tiles a token."""
    if heads > ROWS:
        return -(-heads // ROWS) * ROWS
    return max(8, 1 << (heads - 1).bit_length())


def make_tiles(rows: RaggedRows, tokens: int, per_tile: int) -> tuple[Queries, Array]:
    """Tiles of at most per_tile query tokens of one row: their first token, row and tokens seen by
    the last; and their numbers of tokens.
    """
    lengths = rows.live_lengths()
    each = (lengths + per_tile - 1) // per_tile
    ends = jnp.cumsum(each)
    most = min(tokens, tokens // per_tile + rows.starts.shape[0])
    tile = jnp.arange(most, dtype=jnp.int32)
    row = (tile[:, None] >= ends).sum(axis=1, dtype=jnp.int32)
    live = tile < ends[-1]
    row = jnp.where(live, row, 0)
    offset = (tile - ends[row] + each[row]) * per_tile
    count = jnp.where(live, jnp.minimum(lengths[row] - offset, per_tile), 0)
    seen = (rows.kv_lengths - rows.query_lengths)[row] + offset + count
    token = jnp.where(live, rows.starts[row] + offset, 0)
    return Queries(token=token, row=row, seen=jnp.where(live, seen, 0)), count


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("problem", "plan"))
def attend_tiles(
    q: Float[Array, "tokens heads width"],
    pages: LatentPages,
    rows: RaggedRows,
    problem: Problem,
    plan: TilePlan,
) -> Float[Array, "tokens heads latent"]:
    """Causal attention of every row's query tokens over its pages; heads as tile_heads says."""
    tokens, heads, _ = q.shape
    per_tile, sides = max(ROWS // heads, 1), max(heads // ROWS, 1)
    queries, counts = make_tiles(rows, tokens, per_tile)
    schedules = even_runs(queries, plan.workers)
    out = jax.new_ref(lax.empty((tokens * heads, LATENT), q.dtype))
    parts = jax.new_ref(lax.empty((sides, 2 * plan.workers, ROWS, LATENT), q.dtype))
    weights = jax.new_ref(lax.empty((sides, 2 * plan.workers, ROWS), jnp.float32))
    named = {
        "q": q.reshape(tokens * heads, WIDTH),
        "latents": pages.latents,
        "table": rows.block_table,
        "items": schedules.items,
        "counts": counts,
        "work": schedules.work,
        "out": out,
        "parts": parts,
        "weights": weights,
    }

    _launch(problem, plan, named, sides)
    combine_tiles(problem, out, schedules, counts, parts, weights, rows.token_places(tokens).valid)
    return jax.freeze(out).reshape(tokens, heads, LATENT)


def _launch(problem: Problem, plan: TilePlan, named: dict[str, Any], sides: int) -> None:
    shared = scratch(problem)

    def latent_tiles(*refs: Any) -> None:
        given = SimpleNamespace(**dict(zip((*named, *shared), refs, strict=True)))
        warpgroup = lax.axis_index("warpgroup")
        roles = [(attend, 0), (attend, 1), (score, 0), (score, 1)]
        for index, (role, which) in enumerate(roles):
            pl.when(warpgroup == index)(partial(role, problem, given, which))

    plgpu.kernel(
        latent_tiles,
        scratch_types=list(shared.values()),
        grid=(plan.workers, sides),
        grid_names=("sm", "side"),
        num_threads=4,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=problem.interpret,
    )(*named.values())
