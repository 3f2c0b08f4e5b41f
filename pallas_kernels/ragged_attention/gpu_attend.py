"""The computing warpgroup of paged decode: queries in, softmax over the run's blocks, rows out.

Where it is given the raw QKV product, a row's new keys and values are not read from the pages: the
worker of the row's last block attends them as they are, and writes them to their pages.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_attention.gpu_arrivals import arrive, start_over
from pallas_kernels.ragged_attention.gpu_join import fill_line, join, store_out, store_part
from pallas_kernels.ragged_attention.gpu_lines import copy_layout
from pallas_kernels.ragged_attention.gpu_problem import Problem
from pallas_kernels.ragged_attention.gpu_schedule import (
    BEGAN,
    BLOCK,
    BLOCK0,
    BLOCKS,
    COUNT,
    ENDED,
    FIRST,
    FRESH,
    HEAD,
    ITEM,
    LAST_ENDED,
    LAST_HEAD,
    LAST_ITEM,
    ROW,
    SEEN,
    SEGMENTS,
    TOKEN,
    Segment,
    walk,
)
from pallas_kernels.ragged_attention.gpu_softmax import (
    MASKED,
    PER_ROW,
    ROWS,
    TILE,
    Softmax,
    accumulate,
    advance,
    clear_rows_from,
    fresh,
    scores,
    spread,
    to_log2,
)
from pallas_kernels.rope_write.gpu_turn import Turn, prepared, turned


class Worker(NamedTuple):
    """One pair of warpgroups: its number among all of them, and its place on its SM."""

    problem: Problem
    slots: int
    workers: int
    turn: Turn
    refs: Any
    pair: Any
    number: Any

    def slot(self, use: Any) -> Any:
        """The place in the ring of the worker's n-th load."""
        return self.pair * self.slots + lax.rem(use, jnp.int32(self.slots))


class _Item(NamedTuple):
    """The scalars of a segment's item; first: the segment's first block of the sequence."""

    token: Any
    row: Any
    seen: Any
    first: Any
    fresh: Any
    ends: Any  # whether the segment has the item's last block


def attend(at: Worker) -> None:
    """Walk the worker's run, join the cut rows that it finishes last, and fill padding."""
    walk(at.refs.items, at.refs.work, at.number, at.problem.kv_heads, lambda each: _visit(at, each))
    if not at.problem.interpret:
        _join_cut_rows(at)
    _fill_padding(at)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _visit(at: Worker, segment: Segment) -> None:
    """Attend one segment, and begin to write what comes of it."""
    refs, problem, pair = at.refs, at.problem, at.pair
    columns = [refs.items[segment.item, column] for column in (TOKEN, ROW, SEEN, FIRST, FRESH)]
    token, row, seen, first, new = columns
    ends = segment.block + segment.count == refs.items[segment.item, BLOCKS]
    item = _Item(token, row, seen, first + segment.block, new, ends)
    if problem.raw:
        refs.queries.at[pair][...] = _raw_heads(at, item.token, segment.head)
    else:
        _queries(at, item.token, segment.head)
    plgpu.commit_smem()
    slopes = None
    if problem.alibi:
        slopes = plgpu.load(refs.slopes.at[segment.head], layout=PER_ROW, optimized=False)
    state = lax.fori_loop(
        0,
        segment.count,
        lambda i, state: _block(at, segment, item, slopes, i, state),
        fresh(problem.head_dim),
    )
    if problem.raw:
        state = _new_tokens(at, segment, item, slopes, state)
    whole = (segment.block == 0) & ends

    @pl.when(whole)
    def _store() -> None:
        behind = plgpu.load(refs.spare.at[pair], layout=TILE) if problem.raw else None
        store_out(problem, refs, pair, item.token, segment.head, state, behind)
        if problem.raw:
            _write_new(at, segment, item)

    @pl.when(~whole)
    def _store_part() -> None:
        if problem.raw:

            @pl.when(ends)
            def _write() -> None:
                fill_line(problem, refs, pair, refs.spare.at[pair])
                _write_new(at, segment, item)

        began = jnp.where(segment.block == 0, at.number, refs.work[at.number, BEGAN])
        store_part(problem, refs, pair, began + at.number, state)


def _join_cut_rows(at: Worker) -> None:
    """Count this worker in where its first and its last segment are parts of rows, and join the
    rows of which no part is missing then.
    """
    problem, refs, number = at.problem, at.refs, at.number
    first = (BLOCK0, COUNT, SEGMENTS, BEGAN, ENDED, ITEM, HEAD)
    block, count, segments, began, ended, item, head = (refs.work[number, c] for c in first)
    last = (LAST_ENDED, LAST_ITEM, LAST_HEAD)
    last_ended, last_item, last_head = (refs.work[number, column] for column in last)
    continues = (count > 0) & (block > 0)
    goes_on = (count > 0) & (last_ended > number) & ~(continues & (segments == 1))
    plgpu.wait_smem_to_gmem(0)  # the parts have arrived

    @pl.loop(0, 2)
    def _end(side: Any) -> None:
        @pl.when(jnp.where(side == 0, continues, goes_on))
        def _count_in() -> None:
            begin = jnp.where(side == 0, began, number)
            end = jnp.where(side == 0, ended, last_ended)
            counter, ticket = refs.arrivals.at[end], refs.ticket.at[at.pair]
            arrive(counter, ticket)

            @pl.when(refs.ticket[at.pair] == end - begin)
            def _last() -> None:
                start_over(counter, ticket)
                joined = join(problem, refs, at.pair, begin, end)
                token = refs.items[jnp.where(side == 0, item, last_item), TOKEN]
                mine = jnp.where(side == 0, head, last_head)
                store_out(problem, refs, at.pair, token, mine, joined)


def _fetch(at: Worker, token: Any, head: Any) -> Any:
    """Begin to load one token's rows of one KV head into the line, once that is free."""
    problem, refs = at.problem, at.refs
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if problem.raw:
        mine, rows = refs.source.at[token, head], problem.group + 2
    else:
        rows = problem.group
        mine = refs.source.at[token, pl.ds(head * rows, rows)]
    line = refs.line.at[at.pair]
    plgpu.copy_gmem_to_smem(mine, line.at[pl.ds(0, rows)], refs.ready.at[at.pair])
    return line


def _queries(at: Worker, token: Any, head: Any) -> None:
    """One KV head's queries into their tile."""
    line = _fetch(at, token, head)
    plgpu.barrier_wait(at.refs.ready.at[at.pair])
    rows = plgpu.load(line, layout=copy_layout(at.problem), optimized=False)
    at.refs.queries.at[at.pair][...] = rows


def _raw_heads(at: Worker, token: Any, head: Any) -> jax.Array:
    """One KV head's queries, key and value, turned; they are in the spare tile too."""
    problem, refs = at.problem, at.refs
    line, tile = _fetch(at, token, head), refs.spare.at[at.pair]
    found = prepared(at.turn, refs, token, problem.head_dim)
    plgpu.barrier_wait(refs.ready.at[at.pair])
    tile[...] = plgpu.load(line, layout=copy_layout(problem), optimized=False)
    heads = turned(at.turn, plgpu.load(tile, layout=TILE), found, problem.group, 1)
    row = plgpu.broadcasted_iota(jnp.int32, heads.shape, 0, layout=TILE)
    heads = jnp.where(row < problem.group + 2, heads, jnp.zeros_like(heads))
    tile[...] = heads
    plgpu.commit_smem()
    return heads


def _block(
    at: Worker, segment: Segment, item: _Item, slopes: Any, i: Any, state: Softmax
) -> Softmax:
    """One block of keys and values."""
    problem, refs = at.problem, at.refs
    use = 2 * (segment.done + i)
    keys, values = (refs.ring.at[at.slot(each)] for each in (use, use + 1))
    begin = (item.first + i) * BLOCK
    plgpu.barrier_wait(refs.full.at[at.slot(use)])
    raw = scores(refs.queries.at[at.pair], keys, BLOCK)
    plgpu.barrier_arrive(refs.free.at[at.slot(use)])
    position = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=TILE) + begin
    held = item.fresh if problem.raw else item.seen
    weights, state = _weigh(at, item, slopes, raw, position, position < held, state)
    plgpu.barrier_wait(refs.full.at[at.slot(use + 1)])
    clear_rows_from(values, held - begin, BLOCK, problem.head_dim)
    weights = weights.astype(problem.dtype)
    out = accumulate(state.out, weights, values, bool(problem.interpret))
    plgpu.barrier_arrive(refs.free.at[at.slot(use + 1)])
    return state._replace(out=out)


def _weigh(
    at: Worker, item: _Item, slopes: Any, raw: Any, position: Any, visible: Any, state: Softmax
) -> tuple[jax.Array, Softmax]:
    """Weights of scores of keys at these positions, those that are visible."""
    problem = at.problem
    bias = None
    if slopes is not None:
        distance = (position - (item.seen - 1)).astype(jnp.float32)
        bias = lambda: spread(slopes, BLOCK) * distance
    value, factor = to_log2(raw, problem.scale, problem.soft_cap, bias)
    if problem.window is not None:
        visible &= position >= item.seen - problem.window
    return advance(state, jnp.where(visible, value, MASKED), factor)


def _new_tokens(at: Worker, segment: Segment, item: _Item, slopes: Any, state: Softmax) -> Softmax:
    """The row's keys and values that come with this step: of each token from `fresh` to its own.

    They lie behind the token's queries in one tile, which serves as keys and as values.
    """
    problem, refs = at.problem, at.refs
    tile = refs.spare.at[at.pair]
    column = plgpu.broadcasted_iota(jnp.int32, (ROWS, ROWS), 1, layout=TILE)

    def one(position: Any, state: Softmax) -> Softmax:
        @pl.when(item.fresh + 1 < item.seen)  # the tile has the heads of one token at a time
        def _bring() -> None:
            _raw_heads(at, item.token - (item.seen - 1 - position), segment.head)

        raw = scores(refs.queries.at[at.pair], tile, ROWS)
        positions = jnp.zeros_like(column) + position
        own = column == problem.group
        weights, state = _weigh(at, item, slopes, raw, positions, own, state)
        weight = spread(jnp.where(own, weights, 0.0).sum(axis=1), ROWS)
        shares = jnp.where(column == problem.group + 1, weight, 0.0).astype(problem.dtype)
        return state._replace(out=accumulate(state.out, shares, tile, bool(problem.interpret)))

    return lax.fori_loop(item.fresh, jnp.where(item.ends, item.seen, item.fresh), one, state)


def _write_new(at: Worker, segment: Segment, item: _Item) -> None:
    """Begin to write the token's key and value, behind its queries in the line, to their page.

    The worker has read the page's block before.
    """
    problem, refs = at.problem, at.refs
    position = item.seen - 1
    page, offset = refs.table[item.row, position // problem.page_size], position % problem.page_size
    for side, pages in enumerate((refs.keys, refs.values)):
        plgpu.copy_smem_to_gmem(
            refs.line.at[at.pair, pl.ds(problem.group + side, 1)],
            pages.at[page, pl.ds(segment.head, 1), offset],
        )


def _fill_padding(at: Worker) -> None:
    """Zeros for every token that no row owns; the last workers, seldom busy, begin."""
    problem, refs = at.problem, at.refs
    items = refs.items.shape[0]
    number = at.workers - 1 - at.number
    line = refs.line.at[at.pair]

    @pl.loop(0, (items - number + at.workers - 1) // at.workers)
    def _padding(step: Any) -> None:
        item = number + step * at.workers

        @pl.when(refs.items[item, BLOCKS] == 0)
        def _zero() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            line[...] = plgpu.layout_cast(jnp.zeros(line.shape, problem.dtype), TILE)
            plgpu.commit_smem()
            group, token = problem.group, refs.items[item, TOKEN]
            for head in range(problem.kv_heads):
                plgpu.copy_smem_to_gmem(
                    line.at[pl.ds(0, group)], refs.out.at[token, pl.ds(head * group, group)]
                )
