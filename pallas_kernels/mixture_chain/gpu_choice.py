"""The choice of one token's experts: each expert counts how many are better, all at the same time.

Who is better than all but a few writes itself into the list. There is no turn after turn, of which
each would wait for the one before; and what the token's shares are is found when experts' weights
are on their way already.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.expert_mlp.choice import ChoiceProblem

LISTED = 128  # places of the list, of which the first top_k mean something
_THREADS = 128

# A thread's expert $3 of $2, whose scores lie from $0 on. Of equals the first one is better. The
# first $5 go to the lists from $1 (experts) and $4 (scores) on.
_COUNT = """
{
.reg .pred better, equal, before, more;
.reg .b32 rank, from, other, apart, at;
.reg .f32 mine, a, b, c, d;
shl.b32 at, $3, 2;
add.u32 at, at, $0;
ld.shared.f32 mine, [at];
mov.b32 rank, 0;
mov.b32 from, $0;
mov.b32 other, 0;
NEXT:
ld.shared.v4.f32 {a, b, c, d}, [from];
sub.s32 apart, $3, other;
BETTER
add.u32 from, from, 16;
add.u32 other, other, 4;
setp.lt.u32 more, other, $2;
@more bra NEXT;
setp.lt.u32 better, rank, $5;
shl.b32 at, rank, 2;
add.u32 from, at, $1;
add.u32 at, at, $4;
@better st.shared.b32 [from], $3;
@better st.shared.f32 [at], mine;
}
""".replace(
    "BETTER",
    "\n".join(
        f"setp.gt.s32 before, apart, {number};\n"
        f"setp.eq.and.f32 equal, {name}, mine, before;\n"
        f"setp.gt.or.f32 better, {name}, mine, equal;\n"
        f"@better add.u32 rank, rank, 1;"
        for number, name in enumerate("abcd")
    ),
)


def choose(scores: Any, listed: Any, best: Any, problem: ChoiceProblem, interpret: bool) -> None:
    """Experts int32, best first, and their scores float32, from and to shared memory.

    scores: float32 [experts], in global memory where it is interpreted.
    """
    if interpret:
        _choose_plainly(scores, listed, best, problem)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType()))
    def count(ctx: Any, scores: Any, listed: Any, best: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        start, experts, numbers = (
            llvm.ptrtoint(i32, utils.memref_ptr(each)) for each in (scores, listed, best)
        )
        thread = arith.andi(utils.thread_idx(), utils.c(_THREADS - 1, i32))
        for first in range(0, problem.experts, _THREADS):
            expert = arith.addi(thread, utils.c(first, i32))
            # Threads too many do what the last expert's does.
            expert = arith.minui(expert, utils.c(problem.experts - 1, i32))
            utils.inline_ptx(
                _COUNT,
                start,
                experts,
                utils.c(problem.experts, i32),
                expert,
                numbers,
                utils.c(problem.top_k, i32),
                has_side_effects=True,
            )
        utils.warpgroup_barrier()

    count(scores, listed, best)


def shares_of(scores: Any, best: Any, problem: ChoiceProblem, interpret: bool) -> list[jax.Array]:
    """What each chosen expert's output is multiplied by. scores, best: as of `choose`."""
    numbers = [best[which] for which in range(problem.top_k)]
    if problem.softmax:
        each = [jnp.exp(number - numbers[0]) for number in numbers]
    else:
        each = [1 / (1 + jnp.exp(-number)) for number in numbers]
    total = None
    if problem.normalise:
        total = sum(each[1:], each[0]) + 1e-20
    elif problem.softmax:
        total = _sum_of_powers(scores, numbers[0], problem.experts, interpret)
    if total is not None:
        each = [share / total for share in each]
    return [share * problem.scale for share in each]


def _sum_of_powers(scores: Any, top: jax.Array, experts: int, interpret: bool) -> jax.Array:
    if interpret:
        return jnp.exp(scores[...] - top).sum()
    total = None
    for first in range(0, experts, _THREADS):
        source = scores.at[pl.ds(first, min(_THREADS, experts - first))]
        layout = plgpu.Layout.WGMMA.reduce(0)
        value = plgpu.load(source, layout=layout, optimized=False)
        shift = plgpu.layout_cast(lax.broadcast_in_dim(top, value.shape, ()), layout)
        part = jnp.exp(value - shift).sum(axis=0)
        total = part if total is None else total + part
    assert total is not None
    return total


def _choose_plainly(scores: Any, listed: Any, best: Any, problem: ChoiceProblem) -> None:
    every = scores[...]
    number = jnp.arange(problem.experts, dtype=jnp.int32)
    mine, other = every[:, None], every[None, :]
    better = (other > mine) | ((other == mine) & (number[None, :] < number[:, None]))
    rank = better.sum(axis=1)
    place = jnp.arange(problem.top_k, dtype=jnp.int32)[:, None] == rank
    listed[: problem.top_k] = (place * number).sum(axis=1)
    best[: problem.top_k] = jnp.where(place, every, 0.0).sum(axis=1)
