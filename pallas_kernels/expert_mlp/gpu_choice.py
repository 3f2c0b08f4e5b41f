"""The choice of experts on Hopper in one small kernel: a block of threads serves 64 tokens.

XLA makes a kernel each of the softmax, the sort, the gather of shares and what follows, which take
longer to start than to run.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp.choice import NOBODY, ChoiceProblem

_ROWS = 64
_COLUMNS = 8  # of the results: the smallest tile that holds all choices
_MOST = 128  # experts whose scores fit registers, twice
_TAKEN = -3e38
_TILE = plgpu.Layout.WGMMA


def unsupported(problem: ChoiceProblem) -> str | None:
    """Why the kernel cannot serve this problem; None if it can."""
    if problem.experts % 8 or problem.experts > _MOST:
        return f"the number of experts must be a multiple of 8 up to {_MOST}"
    if problem.top_k > _COLUMNS:
        return f"more than {_COLUMNS} experts a token"
    if problem.tokens > _ROWS and problem.tokens % _ROWS:
        return f"more than {_ROWS} tokens must be a multiple of that"
    if problem.groups > 1:
        return "experts are chosen by groups"
    return None


@partial(jax.jit, static_argnames=("problem", "interpret"))
def run(
    logits: Float[Array, "tokens experts"],
    choice_bias: Float[Array, " experts"] | None,
    *,
    problem: ChoiceProblem,
    interpret: Any = None,
) -> tuple[Int[Array, "tokens choices"], Float[Array, "tokens choices"]]:
    """As choose; the results have 8 columns."""
    tokens, experts = logits.shape
    rows = min(tokens, _ROWS)
    named = [logits] if choice_bias is None else [logits, choice_bias.astype(jnp.float32)]

    def body(*refs: Any) -> None:
        given, (experts_out, shares_out, line, chosen, shares, ready) = refs[:-6], refs[-6:]
        mine = pl.ds(lax.axis_index("block") * rows, rows)
        plgpu.copy_gmem_to_smem(given[0].at[mine], line.at[pl.ds(0, rows)], ready)
        plgpu.barrier_wait(ready)
        bias = None
        if choice_bias is not None:
            bias = plgpu.load(given[1], layout=_TILE.reduce(0), optimized=False)
        value = plgpu.load(line, layout=_TILE, optimized=False)
        chosen[...], shares[...] = _choose(value, bias, problem)
        plgpu.commit_smem()
        for source, target in ((chosen, experts_out), (shares, shares_out)):
            plgpu.copy_smem_to_gmem(source.at[pl.ds(0, rows)], target.at[mine])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    shape = (_ROWS, _COLUMNS)
    found, shares = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((tokens, _COLUMNS), dtype) for dtype in (jnp.int32, jnp.float32)
        ],
        scratch_types=[
            plgpu.SMEM((_ROWS, experts), jnp.float32),
            plgpu.SMEM(shape, jnp.int32),
            plgpu.SMEM(shape, jnp.float32),
            plgpu.Barrier(),
        ],
        grid=(tokens // rows,),
        grid_names=("block",),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="experts_choice",
    )(*named)
    return found, shares


def _choose(
    logits: jax.Array, bias: jax.Array | None, problem: ChoiceProblem
) -> tuple[jax.Array, jax.Array]:
    """Experts and shares [64, 8] of logits [64, experts], all in registers."""
    wide, narrow = logits.shape, (_ROWS, _COLUMNS)

    def spread(row: jax.Array, shape: tuple[int, int]) -> jax.Array:
        return lax.broadcast_in_dim(row, shape, [0])

    def column(shape: tuple[int, int]) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_TILE).astype(jnp.float32)

    def full(value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full(narrow, value, jnp.float32), _TILE)

    # The best softmax is that of the best logit, so only the chosen ones need one.
    direct = problem.softmax and bias is None
    scores = logits
    if problem.softmax:
        top = logits.max(axis=1)
        powers = jnp.exp(logits - spread(top, wide))
        total = powers.sum(axis=1)
        if not direct:
            scores = powers * spread(1 / total, wide)
    else:
        scores = 1 / (1 + jnp.exp(-logits))
    wanted = scores if bias is None else scores + lax.broadcast_in_dim(bias, wide, [1])
    chosen, shares = full(float(NOBODY)), full(0.0)
    for turn in range(problem.top_k):
        best = wanted.max(axis=1)
        first = jnp.where(wanted == spread(best, wide), column(wide), float(_MOST)).min(axis=1)
        taken = column(wide) == spread(first, wide)
        share = jnp.exp(best - top) / total if direct else best
        if bias is not None:
            share = jnp.where(taken, scores, jnp.zeros_like(scores)).sum(axis=1)
        wanted = jnp.where(taken, jnp.full_like(wanted, _TAKEN), wanted)
        mine = column(narrow) == float(turn)
        chosen = jnp.where(mine, spread(first, narrow), chosen)
        shares = jnp.where(mine, spread(share, narrow), shares)
    if problem.normalise:
        shares = shares / (spread(shares.sum(axis=1), narrow) + 1e-20)
    return chosen.astype(jnp.int32), shares * problem.scale
