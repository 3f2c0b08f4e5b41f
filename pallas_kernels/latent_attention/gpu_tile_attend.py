"""An attending warpgroup of gpu_tiles: every block's shares times half of its values' channels."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.latent_attention.gpu_problem import Problem
from pallas_kernels.latent_attention.gpu_tile_memory import (
    HALF,
    OWN_TILES,
    TILE_WIDTH,
    TOPS,
    first_row,
    free,
    full,
    is_whole,
    tile_of,
    top_before,
    top_of,
)
from pallas_kernels.ragged_attention.gpu_schedule import BLOCK, SEEN, Segment, walk
from pallas_kernels.ragged_attention.gpu_softmax import (
    LOG2E,
    PER_ROW,
    ROWS,
    TILE,
    accumulate,
    clear_rows_from,
    row_vector,
    spread,
)

# A thread. Its sums are 128 numbers; with those of the scoring warpgroups, 128 on average, which is
# what a block of 512 threads is given. With 176 some would be spilled.
ATTEND_REGISTERS = 184


def attend(problem: Problem, refs: SimpleNamespace, which: int) -> None:
    """Sum the values of half `which` of the channels over each segment, and store them."""
    plgpu.set_max_registers(ATTEND_REGISTERS, action="increase")
    tiles = range(which * OWN_TILES, (which + 1) * OWN_TILES)

    def compute(segment: Segment) -> None:
        seen = refs.items[segment.item, SEEN]

        def block(i: Any, outs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            number = segment.done + i
            place = number & 1
            outs = _fade(refs, number, i > 0, outs)
            for tile in tiles:
                plgpu.barrier_wait(full(refs, place, tile))
            plgpu.barrier_wait(refs.given)
            shares = plgpu.load(refs.shares, layout=TILE)
            plgpu.barrier_arrive(refs.taken.at[place])
            values = [tile_of(refs, place, tile) for tile in tiles]
            _clear_unseen(values, seen - (segment.block + i) * BLOCK)
            barriers = [free(refs, place, tile) for tile in tiles]
            return _accumulate(outs, shares, values, barriers, interpret=bool(problem.interpret))

        zeros = jnp.zeros((ROWS, TILE_WIDTH), jnp.float32)
        outs = tuple(plgpu.layout_cast(zeros, TILE) for _ in tiles)
        outs = lax.fori_loop(0, segment.count, block, outs)
        plgpu.barrier_wait(refs.summed)
        total = plgpu.load(refs.tops.at[TOPS], layout=PER_ROW)
        total = total + plgpu.load(refs.tops.at[TOPS + 1], layout=PER_ROW)
        outs = tuple(out * spread(1.0 / total, TILE_WIDTH) for out in outs)
        _store(problem, refs, which, segment, outs, total)
        plgpu.barrier_arrive(refs.stored)

    walk(refs.items, refs.work, lax.axis_index("sm"), 1, compute)


def _fade(
    refs: SimpleNamespace, number: Any, began: Any, outs: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The sums, faded to the largest scores up to block `number`; began: there are any."""
    plgpu.barrier_wait(refs.topped.at[number & 1])
    top = plgpu.load(top_of(refs, number), layout=PER_ROW)
    before = plgpu.load(top_before(refs, number), layout=PER_ROW)
    began = lax.broadcast_in_dim(began, (ROWS,), [])
    fade = jnp.exp2(jnp.where(began, before - top, row_vector(0.0)))
    outs = tuple(out * spread(fade, TILE_WIDTH) for out in outs)
    return lax.optimization_barrier(outs)  # now, not after the wait for the shares


def _clear_unseen(values: list[Any], left: Any) -> None:
    """Zero the values of a block's tokens from `left` on, which are not the row's."""

    @pl.when(left < BLOCK)
    def _clear() -> None:
        for each in values:
            for at in range(0, TILE_WIDTH, BLOCK):
                clear_rows_from(each.at[:, pl.ds(at, BLOCK)], left, BLOCK, BLOCK)


def _accumulate(
    outs: tuple[jax.Array, ...],
    shares: jax.Array,
    values: list[Any],
    barriers: list[Any],
    *,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Each out + shares times its values; its barrier hears as soon as that product is done."""
    if interpret:  # the interpreter has no rule for products with a register operand
        pairs = zip(outs, values, strict=True)
        found = tuple(accumulate(out, shares, each, interpret) for out, each in pairs)
        for barrier in barriers:
            plgpu.barrier_arrive(barrier)
        return found

    def product(accumulators: Any) -> None:
        for accumulator, each in zip(accumulators, values, strict=True):
            plgpu.wgmma(accumulator, shares, each)
        for left, barrier in zip(reversed(range(len(barriers))), barriers, strict=True):
            plgpu.wgmma_wait(left)
            plgpu.barrier_arrive(barrier)

    return pl.run_state(product)(tuple(plgpu.ACC.init(out) for out in outs))


def _store(
    problem: Problem,
    refs: SimpleNamespace,
    which: int,
    segment: Segment,
    outs: tuple[jax.Array, ...],
    total: jax.Array,
) -> None:
    """A warpgroup's channels of a whole tile's outputs, or of a part of them with its weight."""
    mine, channels = refs.lines[1].at[which], pl.ds(which * HALF, HALF)
    for index, out in enumerate(outs):
        piece = mine.at[:, pl.ds(index * TILE_WIDTH, TILE_WIDTH)]
        piece[...] = out.astype(problem.dtype)
    whole = is_whole(refs, segment)
    plgpu.commit_smem()
    per_token = min(problem.heads, ROWS)

    @pl.when(whole)
    def _rows() -> None:
        first = first_row(problem, refs, segment)

        @pl.loop(0, refs.counts[segment.item])
        def _token(token: Any) -> None:
            ahead = pl.multiple_of(token * per_token, 8)
            plgpu.copy_smem_to_gmem(
                mine.at[pl.ds(ahead, per_token)],
                refs.out.at[pl.ds(first + ahead, per_token), channels],
            )

    @pl.when(~whole)
    def _part() -> None:
        side = lax.axis_index("side")
        index = 2 * lax.axis_index("sm") + (segment.block == 0).astype(jnp.int32)
        plgpu.copy_smem_to_gmem(mine, refs.parts.at[side, index, :, channels])
        if which == 0:
            last = segment.done + segment.count - 1
            top = plgpu.load(top_of(refs, last), layout=PER_ROW)
            staged = top_of(refs, last + 2)  # which nobody reads any more
            staged[...] = top + jnp.log(total) * LOG2E
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, refs.weights.at[side, index])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
