"""Rows that were cut across workers are put together again: attention over their parts.

A part is a result with the logarithm of its weight, for each head of a group. Joining is one more
softmax, whose scores are those logarithms and whose values are the results; the matrix unit does
it. Results are kept as the sum of two numbers of the narrow type, which is exact enough.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_attention.gpu_lines import copy_layout
from pallas_kernels.ragged_attention.gpu_problem import Problem
from pallas_kernels.ragged_attention.gpu_schedule import (
    BEGAN,
    BLOCK0,
    BLOCKS,
    COUNT,
    HEAD,
    ITEM,
    TOKEN,
    TOKENS,
)
from pallas_kernels.ragged_attention.gpu_softmax import (
    LOG2E,
    MASKED,
    PER_ROW,
    ROWS,
    TILE,
    Softmax,
    accumulate_all,
    across,
    advance,
    clear_rows_from,
    fresh,
    row_vector,
    spread,
)


def part_arrays(problem: Problem, workers: int) -> dict[str, jax.Array]:
    """Uninitialised room for the parts of all cut rows, those of a row one after another.

    The part of worker w in a row that began in worker b is number w + b: no two rows meet.
    """
    rows = 2 * workers * problem.part_rows + ROWS
    return {
        "parts": lax.empty((2, rows, problem.head_dim), problem.dtype),
        "weights": lax.empty((rows,), jnp.float32),
    }


def join_stages(slots: int) -> int:
    """Tiles of parts on their way at a time, each of two: a ring's, its queries' and the spare."""
    return (slots + 2) // 2


def _place(refs: Any, pair: Any, slots: int, number: Any) -> Any:
    """A worker's tile of this number: first its ring's, then its queries' and its spare one."""
    pairs = refs.line.shape[0]
    behind = pairs * slots + (number - slots) * pairs + pair
    return jnp.where(number < slots, pair * slots + number, behind)


def _in_two(value: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """A float32 as the sum of two numbers of a narrower type."""
    high = value.astype(dtype)
    return high, (value - high.astype(jnp.float32)).astype(dtype)


def store_part(
    problem: Problem, refs: Any, pair: Any, number: Any, tokens: Any, state: Softmax
) -> None:
    """Begin to write one part, of so many tokens."""
    value = state.out / spread(state.total, problem.head_dim)
    stride, rows = problem.stride, problem.part_rows
    if problem.tokens > 1 or stride < rows:  # rows of no head may hold anything, and are read
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS, problem.head_dim), 0, layout=TILE)
        live = row < tokens * stride
        if problem.group < stride:
            live &= lax.rem(row, jnp.int32(stride)) < problem.group
        value = jnp.where(live, value, 0.0)
    high, low = _in_two(value, problem.dtype)
    refs.queries.at[pair][...] = high
    refs.spare.at[pair][...] = low
    refs.logs.at[0, pair][...] = state.top + jnp.log(state.total) * LOG2E
    plgpu.commit_smem()
    held = pl.ds(0, rows)
    place = pl.ds(pl.multiple_of(number * rows, 8), rows)
    plgpu.copy_smem_to_gmem(refs.queries.at[pair, held], refs.parts.at[0, place])
    plgpu.copy_smem_to_gmem(refs.spare.at[pair, held], refs.parts.at[1, place])
    plgpu.copy_smem_to_gmem(refs.logs.at[0, pair, held], refs.weights.at[place])


def join(
    problem: Problem, refs: Any, pair: Any, slots: int, first: Any, count: Any, state: Softmax
) -> Softmax:
    """The softmax that goes on from this one with so many parts of a row, from number `first`.

    It uses the worker's ring, through which all blocks have gone, and the tiles of its queries and
    of its own part: while one tile of parts is attended, as many as they hold are on their way.
    """
    group, head_dim = problem.part_rows, problem.head_dim
    rows = count * group
    steps = (rows + ROWS - 1) // ROWS
    stages = join_stages(slots)

    def stage(index: Any) -> tuple[list[Any], Any, Any]:
        turn = lax.rem(index, jnp.int32(stages))
        tiles = [refs.ring.at[_place(refs, pair, slots, 2 * turn + side)] for side in range(2)]
        return tiles, refs.logs.at[turn, pair], refs.fetched.at[stages * pair + turn]

    def fetch(index: Any) -> None:
        tiles, logs, fetched = stage(index)
        place = pl.ds(pl.multiple_of(first * group + index * ROWS, 8), ROWS)
        for side, tile in enumerate(tiles):
            plgpu.copy_gmem_to_smem(refs.parts.at[side, place], tile, fetched)
        plgpu.copy_gmem_to_smem(refs.weights.at[place], logs, fetched)

    def some(index: Any, state: Softmax) -> Softmax:
        tiles, stored, fetched = stage(index)
        plgpu.barrier_wait(fetched)
        for tile in tiles:
            clear_rows_from(tile, rows - index * ROWS, ROWS, head_dim)
        shape = (ROWS, ROWS)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE)
        part = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE) + index * ROWS
        own = (lax.rem(part, jnp.int32(group)) == row) & (part < rows)
        shares, state = advance(state, jnp.where(own, across(stored, ROWS), MASKED), 1.0)
        high, low = _in_two(shares, problem.dtype)
        pairs = ((high, tiles[0]), (low, tiles[0]), (high, tiles[1]))
        out = accumulate_all(state.out, pairs, bool(problem.interpret))
        plgpu.commit_smem()
        pl.when(index + stages < steps)(lambda: fetch(index + stages))
        return state._replace(out=out)

    pl.loop(0, jnp.minimum(steps, stages))(fetch)
    return lax.fori_loop(0, steps, some, state)


def store_out(
    problem: Problem, refs: Any, pair: Any, token: Any, tokens: Any, head: Any, state: Softmax
) -> None:
    """Begin to write the finished rows of so many tokens' groups."""
    top, total = state.top, state.total
    fade = row_vector(1.0)
    if problem.sinks:
        sink = plgpu.load(refs.sinks.at[head], layout=PER_ROW, optimized=False) * LOG2E
        top = jnp.maximum(state.top, sink)
        fade = jnp.exp2(state.top - top)
        total = total * fade + jnp.exp2(sink - top)
    # Through the query tile, whose swizzle spares the bank conflicts of writing plain rows.
    queries, line = refs.queries.at[pair], refs.line.at[pair]
    queries[...] = (state.out * spread(fade / total, problem.head_dim)).astype(problem.dtype)
    rows = plgpu.load(queries, layout=copy_layout(problem))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the line may still be on its way out
    line[...] = rows
    plgpu.commit_smem()
    group = problem.group

    def send(index: Any) -> None:
        rows = line.at[pl.ds(index * problem.stride, group)]
        plgpu.copy_smem_to_gmem(rows, refs.out.at[token + index, pl.ds(head * group, group)])

    if problem.tokens == 1:
        send(0)
    else:
        pl.loop(0, tokens)(send)


def join_ended(problem: Problem, refs: Any, worker: Any, slots: int) -> None:
    """A pass of its own over what one worker ended: for the interpreter, which cannot count."""
    item, head, block = (refs.work[worker, column] for column in (ITEM, HEAD, BLOCK0))
    rest = refs.items[item, BLOCKS] - block

    @pl.when((block > 0) & (refs.work[worker, COUNT] >= rest))
    def _join() -> None:
        began = refs.work[worker, BEGAN]
        parts = 2 * began, worker - began + 1
        state = join(problem, refs, 0, slots, *parts, fresh(problem.head_dim))
        token, tokens = refs.items[item, TOKEN], refs.items[item, TOKENS]
        store_out(problem, refs, 0, token, tokens, head, state)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
