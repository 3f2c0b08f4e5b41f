"""A scoring warpgroup of gpu_tiles: every other block, from its loading to its tokens' shares.

There are two, so that the softmax of one's block runs under the products of the other's.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.latent_attention.gpu_problem import NEVER, Problem
from pallas_kernels.latent_attention.gpu_tile_load import bring_near, load_block, page_of
from pallas_kernels.latent_attention.gpu_tile_memory import (
    KEY_TILE,
    ORDER,
    TOPS,
    channels_of,
    first_row,
    free,
    full,
    tile_of,
    top_before,
    top_of,
)
from pallas_kernels.ragged_attention.gpu_schedule import BLOCK, BLOCKS, COUNT, SEEN, Segment, walk
from pallas_kernels.ragged_attention.gpu_softmax import (
    LOG2E,
    MASKED,
    PER_ROW,
    ROWS,
    TILE,
    row_vector,
    spread,
)

SCORE_REGISTERS = 72  # a thread; what the attending warpgroups leave
_NEAR = 4  # blocks ahead that the L2 is asked for: the next but one of this warpgroup's own


def score(problem: Problem, refs: SimpleNamespace, which: int) -> None:
    """Load the blocks of place `which` and give the attending warpgroups, for each, the largest
    scores so far, and then its shares; after a segment, the sum of those that were given.
    """
    plgpu.set_max_registers(SCORE_REGISTERS, action="decrease")
    worker = lax.axis_index("sm")

    def compute(segment: Segment) -> None:
        first = (which + segment.done) & 1  # of this warpgroup's blocks
        mine = (segment.count - first + 1) // 2
        load = partial(load_block, problem, refs, which, segment)
        pl.when(mine > 0)(lambda: load(first, page_of(problem, refs, segment, first)))
        pl.when(segment.done > 0)(lambda: plgpu.barrier_wait(refs.stored))
        if which == 0:
            rows = pl.ds(first_row(problem, refs, segment), ROWS)
            plgpu.copy_gmem_to_smem(refs.q.at[rows], refs.lines[0].at[0], refs.ready)
        plgpu.barrier_wait(refs.ready)
        # Tokens that the tile's first query token sees; each next one sees one more.
        to_first = refs.items[segment.item, SEEN] - refs.counts[segment.item] + 1

        def block(masked: bool, n: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
            i = first + 2 * n
            page = page_of(problem, refs, segment, i + 2)  # asked for early, for it takes a while
            value, factor = _scores(problem, refs, which, segment, i, to_first if masked else None)
            top, total = state
            new = _raise_top(refs, which, segment, i, value, factor)
            shares = jnp.exp2(value * factor - spread(new, BLOCK))
            _give(refs, which, segment.done + i, shares)
            total = total * jnp.exp2(top - new) + shares.sum(axis=1)
            pl.when(i + 2 < segment.count)(lambda: load(i + 2, page))
            bring_near(problem, refs, segment, i + _NEAR)
            return new, total

        clear = jnp.clip(to_first // BLOCK - segment.block, 0, segment.count)
        clear = jnp.clip((clear - first + 1) // 2, 0, mine)
        state = (row_vector(MASKED), row_vector(0.0))
        state = lax.fori_loop(0, clear, partial(block, False), state)
        state = lax.fori_loop(clear, mine, partial(block, True), state)
        _give_sum(refs, which, segment, *state)

    walk(refs.items, refs.work, worker, 1, compute)
    _await_rest(refs, which, worker)


def _scores(
    problem: Problem,
    refs: SimpleNamespace,
    which: int,
    segment: Segment,
    i: Any,
    to_first: Any | None,
) -> tuple[jax.Array, float]:
    """Scores of a segment's block i, and what they are still to be multiplied by.

    to_first: tokens that the tile's first query token sees; None: every one sees all of the block.
    """
    queries, factor = refs.lines[0], problem.scale * LOG2E

    def product(accumulator: Any) -> jax.Array:
        for tile in ORDER:
            plgpu.barrier_wait(full(refs, which, tile))
            channels = queries.at[i >> NEVER, :, channels_of(tile)]
            keys = tile_of(refs, which + (i >> NEVER), tile)
            plgpu.wgmma(accumulator, channels, keys.transpose((1, 0)))
        return accumulator[...]

    value = pl.run_scoped(product, plgpu.ACC((ROWS, BLOCK), jnp.float32))
    if to_first is None:
        return value, factor
    at = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=TILE)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 0, layout=TILE)
    limit = to_first - (segment.block + i) * BLOCK
    # Scaled before it is masked: of a row that sees nothing here, the difference of
    # the masked value and the top must be 0, and no rounding of a huge product.
    return jnp.where(at < row // min(problem.heads, ROWS) + limit, value * factor, MASKED), 1.0


def _raise_top(
    refs: SimpleNamespace, which: int, segment: Segment, i: Any, value: jax.Array, factor: float
) -> jax.Array:
    """The largest scores up to a segment's block i, given to all: the other scoring warpgroup needs
    them for its next block, and the attending ones fade their sums before the shares come.
    """
    number = segment.done + i
    pl.when(i > 0)(lambda: plgpu.barrier_wait(refs.topped.at[1 - which]))
    before = plgpu.load(top_before(refs, number), layout=PER_ROW)
    began = lax.broadcast_in_dim(i > 0, (ROWS,), [])
    before = jnp.where(began, before, row_vector(MASKED))
    top = jnp.maximum(before, value.max(axis=1) * factor)
    top_of(refs, number)[...] = top
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.topped.at[which])
    return top


def _give(refs: SimpleNamespace, which: int, number: Any, shares: jax.Array) -> None:
    """The shares of the run's block `number`, once those of the block before have been taken."""
    pl.when(number > 0)(lambda: plgpu.barrier_wait(refs.taken.at[1 - which]))
    refs.shares[...] = shares.astype(refs.shares.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.given)


def _give_sum(
    refs: SimpleNamespace, which: int, segment: Segment, top: jax.Array, total: jax.Array
) -> None:
    """This warpgroup's sum of a segment's shares, faded to the segment's largest scores."""
    last, other = segment.done + segment.count - 1, 1 - which
    pl.when((last & 1) == other)(lambda: plgpu.barrier_wait(refs.topped.at[other]))
    final = plgpu.load(top_of(refs, last), layout=PER_ROW)
    refs.tops.at[TOPS + which][...] = total * jnp.exp2(top - final)
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.summed)


def _await_rest(refs: SimpleNamespace, which: int, worker: Any) -> None:
    """Every arrival must be seen before the end."""
    # Asked for again, at an address that the compiler does not keep.
    count = refs.work[worker + (refs.items[0, BLOCKS] >> NEVER), COUNT]

    @pl.when(count > which)
    def _blocks() -> None:
        for tile in ORDER:
            if tile != KEY_TILE:
                plgpu.barrier_wait(free(refs, which, tile))

    @pl.when(count > 0)
    def _last() -> None:
        other = 1 - which
        pl.when((count & 1) == which)(lambda: plgpu.barrier_wait(refs.taken.at[other]))
        plgpu.barrier_wait(refs.stored)
