"""The choice of one token's experts: each expert counts how many are better, all at the same time.

Who is better than all but a few writes itself into the list. There is no turn after turn, of which
each would wait for the one before.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.expert_mlp.choice import ChoiceProblem

LISTED = 128  # places of the list, of which the first top_k mean something
ROWS = 64  # experts that compare themselves at a time
_TILE = plgpu.Layout.WGMMA
_ROW, _COLUMN = _TILE.reduce(1), _TILE.reduce(0)


def choose(logits: Any, listed: Any, shares: Any, problem: ChoiceProblem, interpret: bool) -> None:
    """Experts int32, best first, and their shares float32, both to shared memory.

    logits: float32 [experts] in global memory. The shares are before they are normalised and
    scaled: see `share_of`.
    """
    every = plgpu.load(logits, layout=_COLUMN, optimized=False)
    experts = every.shape[0]
    if problem.softmax:
        top = every.max(axis=0)
        total = jnp.exp(every - _spread(top, experts, _COLUMN)).sum(axis=0)
    wide = (ROWS, experts)
    other = plgpu.broadcasted_iota(jnp.int32, wide, 1, layout=_TILE)
    for first in range(0, experts, ROWS):
        mine = plgpu.load(logits.at[pl.ds(first, ROWS)], layout=_ROW, optimized=False)
        number = plgpu.broadcasted_iota(jnp.int32, wide, 0, layout=_TILE) + first
        here, there = lax.broadcast_in_dim(mine, wide, [0]), lax.broadcast_in_dim(every, wide, [1])
        better = (there > here) | ((there == here) & (other < number))  # of equals the first one
        rank = jnp.where(better, jnp.full_like(here, 1.0), jnp.zeros_like(here)).sum(axis=1)
        if problem.softmax:
            share = jnp.exp(mine - _spread(top, ROWS, _ROW)) / _spread(total, ROWS, _ROW)
        else:
            share = 1 / (1 + jnp.exp(-mine))
        _list(listed, shares, rank.astype(jnp.int32), share, first, problem.top_k, interpret)


def share_of(shares: Any, problem: ChoiceProblem) -> list[jax.Array]:
    """What each chosen expert's output is multiplied by."""
    each = [shares[which] for which in range(problem.top_k)]
    if problem.normalise:
        total = sum(each[1:], each[0]) + 1e-20
        each = [share / total for share in each]
    return [share * problem.scale for share in each]


def _spread(number: jax.Array, size: int, layout: Any) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(number, (size,), ()), layout)


def _list(
    listed: Any,
    shares: Any,
    rank: jax.Array,
    share: jax.Array,
    first: int,
    top_k: int,
    interpret: bool,
) -> None:
    """Of experts from `first` on, those of the best ranks write themselves down."""
    if interpret:
        place = jnp.arange(top_k, dtype=jnp.int32)[:, None] == rank
        there = place.any(axis=1)
        number = (place * (first + jnp.arange(ROWS, dtype=jnp.int32))).sum(axis=1)
        listed[:top_k] = jnp.where(there, number, listed[:top_k])
        shares[:top_k] = jnp.where(there, (place * share).sum(axis=1), shares[:top_k])
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _ROW, _ROW))
    def write(ctx: Any, listed: Any, shares: Any, rank: Any, share: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        pairs = zip(rank.registers.flat, share.registers.flat, _own_rows(i32), strict=True)
        for rank_, share_, row in pairs:
            place, value = (
                vector.extract(each, dynamic_position=[], static_position=[0])
                for each in (rank_, share_)
            )
            chosen = arith.cmpi(arith.CmpIPredicate.ult, place, utils.c(top_k, i32))
            offset = arith.muli(arith.select(chosen, place, utils.c(0, i32)), utils.c(4, i32))
            number = arith.addi(row, utils.c(first, i32))
            for target, kind, stored in ((listed, "b32", number), (shares, "f32", value)):
                start = llvm.ptrtoint(i32, utils.memref_ptr(target))
                utils.inline_ptx(
                    f"st.shared.{kind} [$0], $1;",
                    arith.addi(start, offset),
                    stored,
                    predicate=chosen,
                    has_side_effects=True,
                )
        utils.warpgroup_barrier()

    write(listed, shares, rank, share)


def _own_rows(i32: Any) -> list[Any]:
    """The rows of a tile that a thread holds: 8 apart."""
    thread = utils.thread_idx()
    lane = arith.remui(thread, utils.c(32, i32))
    warp = arith.remui(arith.divui(thread, utils.c(32, i32)), utils.c(4, i32))
    row = arith.addi(arith.muli(warp, utils.c(16, i32)), arith.divui(lane, utils.c(4, i32)))
    return [row, arith.addi(row, utils.c(8, i32))]
