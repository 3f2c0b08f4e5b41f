"""RMSNorm of the tokens in shared memory, in place: statistics in float32, product in theirs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layer_chain.gpu_plan import PARTS, Plan, Problem, Stage


def layout_of(columns: int) -> Any:
    """How a warpgroup holds one token's chunk [PARTS, columns]: without bank conflicts."""
    if columns == 64:
        return plgpu.Layout.TILED(
            plgpu.Tiling(((8, 64), (2, 64), (4,))),
            warp_dims=(-5,),
            lane_dims=(-3, -2),
            vector_dim=-1,
        )
    return plgpu.Layout.TILED(
        plgpu.Tiling(((8, 128), (4, 64), (8,))),
        warp_dims=(-5, -4),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def norm_weights(problem: Problem, plan: Plan, stage: Stage, refs: Any) -> list[jax.Array]:
    """The norm's weights, chunk by chunk, in registers: loaded while others still compute."""
    weight = getattr(refs, stage.norm)
    return [
        plgpu.load(
            weight.at[:, pl.ds(chunk * plan.columns, plan.columns)],
            layout=layout_of(plan.columns),
            optimized=False,
        )
        for chunk in range(stage.width // plan.columns)
    ]


def normalise(
    problem: Problem, plan: Plan, stage: Stage, refs: Any, weights: list[jax.Array]
) -> None:
    """x / rms(x) * weight for every token, rounded where the plain norm rounds."""
    layout = layout_of(plan.columns)

    @pl.loop(0, problem.rows)
    def _row(row: Any) -> None:
        mine = pl.ds(pl.multiple_of(row * PARTS, PARTS), PARTS)
        chunks = [refs.tokens.at[chunk, mine] for chunk in range(len(weights))]
        values = [plgpu.load(chunk, layout=layout, optimized=False) for chunk in chunks]
        squares = sum(jnp.square(value.astype(jnp.float32)) for value in values)
        total = squares.sum(axis=1).sum(axis=0)  # layouts of both axes at once are not inferred
        factor = lax.rsqrt(total / stage.inner + problem.eps)
        for chunk, value, weight in zip(chunks, values, weights, strict=True):
            scaled = (value.astype(jnp.float32) * factor).astype(problem.dtype)
            chunk[...] = scaled * weight

    plgpu.commit_smem()
