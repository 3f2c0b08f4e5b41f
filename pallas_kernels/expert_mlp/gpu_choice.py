"""The choice of experts on Hopper in one small kernel: a block of threads serves 8 tokens.

XLA makes a kernel each of the softmax, the sort, the gather of shares and what follows, which take
longer to start than to run.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp.choice import NOBODY, ChoiceProblem

_ROWS = 8
_MOST = 512  # experts whose scores fit registers
_TAKEN = -3e38


def _columns(experts: int) -> int:
    """Columns of a tile, and of the results."""
    return 64 if experts % 64 == 0 else 32


def _tile(columns: int) -> Any:
    """16 lanes a token, so that even few tokens keep all lanes busy."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((_ROWS, columns), (2, columns), (columns // 16,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def unsupported(problem: ChoiceProblem) -> str | None:
    """Why the kernel cannot serve this problem; None if it can."""
    if problem.experts > _MOST:
        return f"more than {_MOST} experts"
    if problem.top_k > _columns(problem.experts):
        return f"more than {_columns(problem.experts)} experts a token"
    if problem.tokens > _ROWS and problem.tokens % _ROWS:
        return f"more than {_ROWS} tokens must be a multiple of that"
    return None


@partial(jax.jit, static_argnames=("problem", "interpret"))
def run(
    logits: Float[Array, "tokens experts"],
    choice_bias: Float[Array, " experts"] | None,
    *,
    problem: ChoiceProblem,
    interpret: Any = None,
) -> tuple[Int[Array, "tokens choices"], Float[Array, "tokens choices"]]:
    """As choose; the results have 32 or 64 columns."""
    tokens, experts = logits.shape[0], -(-problem.experts // 32) * 32
    rows, columns = min(tokens, _ROWS), _columns(experts)
    named = [logits] if choice_bias is None else [logits, choice_bias.astype(jnp.float32)]
    if experts != problem.experts:  # by experts that nobody chooses
        behind = (0, experts - problem.experts)
        widths = ((0, 0), behind), (behind,)
        named = [
            jnp.pad(each, width, constant_values=-jnp.inf)
            for each, width in zip(named, widths, strict=False)
        ]

    def body(*refs: Any) -> None:
        given, (experts_out, shares_out, line, chosen, shares, ready) = refs[:-6], refs[-6:]
        mine = pl.ds(lax.axis_index("block") * rows, rows)
        plgpu.copy_gmem_to_smem(given[0].at[mine], line.at[pl.ds(0, rows)], ready)
        bias = None
        if choice_bias is not None:
            bias = plgpu.load(given[1], layout=_tile(columns).reduce(0), optimized=False)
        plgpu.barrier_wait(ready)
        value = plgpu.load(line, layout=_tile(columns), optimized=False)
        chosen[...], shares[...] = _choose(value, bias, problem)
        plgpu.commit_smem()
        for source, target in ((chosen, experts_out), (shares, shares_out)):
            plgpu.copy_smem_to_gmem(source.at[pl.ds(0, rows)], target.at[mine])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    found, shares = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((tokens, columns), dtype) for dtype in (jnp.int32, jnp.float32)
        ],
        scratch_types=[
            plgpu.SMEM((_ROWS, experts), jnp.float32),
            plgpu.SMEM((_ROWS, columns), jnp.int32),
            plgpu.SMEM((_ROWS, columns), jnp.float32),
            plgpu.Barrier(),
        ],
        grid=(tokens // rows,),
        grid_names=("block",),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="experts_choice",
    )(*named)
    return found, shares


def _spread(row: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(row, shape, [0])


def _column(shape: tuple[int, int]) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_tile(_columns(shape[1]))).astype(
        jnp.float32
    )


def _first(best: jax.Array, values: jax.Array) -> jax.Array:
    """The column of each row's first value that is its best."""
    wide = values.shape
    return jnp.where(values == _spread(best, wide), _column(wide), 2.0 * _MOST).min(axis=1)


def _choose(
    logits: jax.Array, bias: jax.Array | None, problem: ChoiceProblem
) -> tuple[jax.Array, jax.Array]:
    """Experts and shares [8, columns] of logits [8, experts], all in registers."""
    wide = logits.shape
    narrow = (_ROWS, _columns(wide[1]))

    def full(value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full(narrow, value, jnp.float32), _tile(narrow[1]))

    column = _column(wide)
    # The best softmax is that of the best logit, so only the chosen ones need one.
    direct = problem.softmax and bias is None and problem.groups == 1
    scores = logits
    if problem.softmax:
        top = logits.max(axis=1)
        powers = jnp.exp(logits - _spread(top, wide))
        total = powers.sum(axis=1)
        if not direct:
            scores = powers * _spread(1 / total, wide)
    else:
        scores = 1 / (1 + jnp.exp(-logits))
    wanted = scores if bias is None else scores + lax.broadcast_in_dim(bias, wide, [1])
    if problem.groups > 1:
        wanted = _within_groups(wanted, problem)
    chosen, shares = full(float(NOBODY)), full(0.0)
    for turn in range(problem.top_k):
        best = wanted.max(axis=1)
        first = _first(best, wanted)
        taken = column == _spread(first, wide)
        share = jnp.exp(best - top) / total if direct else best
        if bias is not None:
            share = jnp.where(taken, scores, jnp.zeros_like(scores)).sum(axis=1)
        wanted = jnp.where(taken, jnp.full_like(wanted, _TAKEN), wanted)
        mine = _column(narrow) == float(turn)
        chosen = jnp.where(mine, _spread(first, narrow), chosen)
        shares = jnp.where(mine, _spread(share, narrow), shares)
    if problem.normalise:
        shares = shares / (_spread(shares.sum(axis=1), narrow) + 1e-20)
    return chosen.astype(jnp.int32), shares * problem.scale


def _within_groups(wanted: jax.Array, problem: ChoiceProblem) -> jax.Array:
    """Scores of experts outside the best groups become less than any."""
    size, wide = problem.experts // problem.groups, wanted.shape
    column, none = _column(wide), jnp.full_like(wanted, _TAKEN)
    inside: list[Callable[[], jax.Array]] = [
        lambda g=g: (column >= float(g * size)) & (column < float((g + 1) * size))
        for g in range(problem.groups)
    ]
    worth = []
    for mine in inside:
        left = jnp.where(mine(), wanted, none)
        best = left.max(axis=1)
        total = best
        for _ in range(problem.group_best - 1):
            left = jnp.where(column == _spread(_first(best, left), wide), none, left)
            best = left.max(axis=1)
            total = total + best
        worth.append(total)
    kept = [jnp.zeros_like(each) for each in worth]
    for _ in range(problem.top_groups):
        best = reduce(jnp.maximum, worth)
        free = jnp.ones_like(best)
        for g in range(problem.groups):
            hit = jnp.where(worth[g] == best, free, jnp.zeros_like(best))
            free, kept[g] = free - hit, kept[g] + hit
            worth[g] = jnp.where(hit > 0.5, jnp.full_like(best, _TAKEN), worth[g])
    for mine, group in zip(inside, kept, strict=True):
        dropped = jnp.where(mine(), 1 - _spread(group, wide), jnp.zeros_like(wanted))
        wanted = jnp.where(dropped > 0.5, none, wanted)
    return wanted
