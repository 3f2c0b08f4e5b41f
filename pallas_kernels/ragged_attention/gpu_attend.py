"""The computing warpgroup of paged decode: queries in, softmax over the run's blocks, rows out."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_attention.gpu_arrivals import arrive, arrived, start_over
from pallas_kernels.ragged_attention.gpu_join import join, store_out, store_part
from pallas_kernels.ragged_attention.gpu_lines import copy_layout
from pallas_kernels.ragged_attention.gpu_problem import Problem
from pallas_kernels.ragged_attention.gpu_schedule import (
    BEGAN,
    BLOCK,
    BLOCK0,
    BLOCKS,
    COUNT,
    FIRST,
    FIRST_ITEM,
    HEAD,
    LAST_ENDED,
    SEEN,
    SEGMENTS,
    TOKEN,
    TOKENS,
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


class Worker(NamedTuple):
    """One pair of warpgroups: its number among all of them, and its place on its SM."""

    problem: Problem
    slots: int
    workers: int
    refs: Any
    pair: Any
    number: Any

    def slot(self, use: Any) -> Any:
        """The place in the ring of the worker's n-th load."""
        return self.pair * self.slots + lax.rem(use, jnp.int32(self.slots))


class _Item(NamedTuple):
    """The scalars of a segment's item; first: the segment's first block of the sequence."""

    token: Any
    tokens: Any
    seen: Any
    first: Any

    def sees(self, problem: Problem, begin: Any) -> Any:
        """KV tokens from this one on that the token of each row of a tile of scores sees."""
        left = self.seen - begin
        if problem.tokens == 1:
            return left
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
        one = left - self.tokens + 1 + lax.div(row, jnp.int32(problem.stride))
        # Rows behind the last token's see nothing new.
        return spread(jnp.minimum(one, left), BLOCK)


class _Parts(NamedTuple):
    """A row that lies with the workers from began to ended; begins: this worker has its first
    part; token, tokens, head: what it is a row of.
    """

    began: Any
    ended: Any
    begins: Any
    token: Any
    tokens: Any
    head: Any


def attend(at: Worker) -> None:
    """Walk the worker's run, and fill padding."""
    refs, kv_heads = at.refs, at.problem.kv_heads
    walk(refs.items, refs.work, at.number, kv_heads, lambda each: _visit(at, each), known=True)
    if not at.problem.interpret:
        _join_late(at)
    if at.problem.tokens == 1:  # of batches with longer rows, prefill does it
        _fill_padding(at)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _visit(at: Worker, segment: Segment) -> None:
    """Attend one segment, and begin to write what comes of it: a row, or a part of one, which the
    worker that comes last joins with the others.
    """
    refs, problem, pair = at.refs, at.problem, at.pair
    columns = (TOKEN, TOKENS, SEEN, FIRST)
    token, tokens, seen, first = (segment.columns[each] for each in columns)
    item = _Item(token, tokens, seen, first + segment.block)
    _load_queries(at, token, segment.head)
    slopes = None
    if problem.alibi:
        slopes = plgpu.load(refs.slopes.at[segment.head], layout=PER_ROW, optimized=False)
    state = lax.fori_loop(
        0,
        segment.count,
        lambda i, state: _block(at, segment, item, slopes, i, state),
        fresh(problem.head_dim),
    )
    begins = segment.block == 0
    whole = begins & (segment.count == segment.columns[BLOCKS])

    @pl.when(whole)
    def _store() -> None:
        store_out(problem, refs, pair, token, tokens, segment.head, state)

    @pl.when(~whole)
    def _store_part() -> None:
        began = jnp.where(begins, at.number, refs.work[at.number, BEGAN])
        if problem.interpret:
            store_part(problem, refs, pair, began + at.number, tokens, state)
            return
        goes_on = segment.block + segment.count < segment.columns[BLOCKS]
        ended = jnp.where(goes_on, refs.work[at.number, LAST_ENDED], at.number)
        parts = _Parts(began, ended, begins, token, tokens, segment.head)
        _contribute(at, parts, state)


def _contribute(at: Worker, row: _Parts, state: Softmax) -> None:
    """Store a part for the others; or, where all of them are there, join them with it.

    A row's first part is the end of a worker's run, the others the beginnings of later workers':
    mostly it comes last, and never leaves the registers. Where a later one comes last, and its run
    goes on, the ring is in use: it joins at the end.
    """
    problem, refs, pair = at.problem, at.refs, at.pair
    early = ~row.begins & (refs.work[at.number, SEGMENTS] > 1)
    counter, ticket = refs.arrivals.at[row.ended], refs.ticket.at[early.astype(jnp.int32), pair]
    others = row.ended - row.began
    pl.when(row.begins)(lambda: arrived(counter, ticket))
    at_hand = row.begins & (refs.ticket[0, pair] == others)

    @pl.when(~at_hand)
    def _store() -> None:
        store_part(problem, refs, pair, row.began + at.number, row.tokens, state)
        plgpu.wait_smem_to_gmem(0)  # the part has arrived
        arrive(counter, ticket)

    @pl.when(~early & (refs.ticket[0, pair] == others))
    def _last() -> None:
        keep = jnp.where(at_hand, 1.0, 0.0)
        own = Softmax(state.out * keep, state.top * keep + MASKED * (1 - keep), state.total * keep)
        _join(at, row, at_hand.astype(jnp.int32), own)


def _join(at: Worker, row: _Parts, first: Any, state: Softmax) -> None:
    """Finish a row: its parts from this one on join the state."""
    problem, refs, pair = at.problem, at.refs, at.pair
    start_over(refs.arrivals.at[row.ended], refs.ticket.at[0, pair])
    number, count = 2 * row.began + first, row.ended - row.began - first + 1
    joined = join(problem, refs, pair, at.slots, number, count, state)
    store_out(problem, refs, pair, row.token, row.tokens, row.head, joined)


def _join_late(at: Worker) -> None:
    """Join the row that the worker's first segment was the last part of, if it came last."""
    refs, number = at.refs, at.number
    columns = (BLOCK0, COUNT, SEGMENTS, BEGAN, HEAD, FIRST_ITEM + TOKEN, FIRST_ITEM + TOKENS)
    block, count, segments, began, head, token, tokens = (refs.work[number, c] for c in columns)
    early = (count > 0) & (block > 0) & (segments > 1)

    @pl.when(early & (refs.ticket[1, at.pair] == number - began))
    def _last() -> None:
        row = _Parts(began, number, jnp.bool_(False), token, tokens, head)
        _join(at, row, 0, fresh(at.problem.head_dim))


def _load_queries(at: Worker, token: Any, head: Any) -> None:
    """One KV head's queries of the tokens from this one on into their tile, by way of the line,
    once that is free.
    """
    problem, refs, group = at.problem, at.refs, at.problem.group
    line, ready = refs.line.at[at.pair], refs.ready.at[at.pair]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def take(index: Any) -> None:
        # Past an item's tokens come those of another one, whose outputs are dropped.
        each = jnp.minimum(token + index, refs.q.shape[0] - 1)
        mine = refs.q.at[each, pl.ds(head * group, group)]
        plgpu.copy_gmem_to_smem(mine, line.at[pl.ds(index * problem.stride, group)], ready)

    take(0) if problem.tokens == 1 else pl.loop(0, problem.tokens)(take)
    plgpu.barrier_wait(ready)
    rows = plgpu.load(line, layout=copy_layout(problem), optimized=False)
    refs.queries.at[at.pair][...] = rows
    plgpu.commit_smem()


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
    key = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=TILE)
    sees = item.sees(problem, begin)
    bias = None
    if slopes is not None:
        distance = (key - (sees - 1)).astype(jnp.float32)
        bias = lambda: spread(slopes, BLOCK) * distance
    value, factor = to_log2(raw, problem.scale, problem.soft_cap, bias)
    visible = key < sees
    if problem.window is not None:
        visible &= key >= sees - problem.window
    weights, state = advance(state, jnp.where(visible, value, MASKED), factor)
    plgpu.barrier_wait(refs.full.at[at.slot(use + 1)])
    clear_rows_from(values, item.seen - begin, BLOCK, problem.head_dim)
    weights = weights.astype(problem.dtype)
    out = accumulate(state.out, weights, values, bool(problem.interpret))
    plgpu.barrier_arrive(refs.free.at[at.slot(use + 1)])
    return state._replace(out=out)


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
            line[...] = plgpu.layout_cast(
                jnp.zeros(line.shape, problem.dtype), copy_layout(problem)
            )
            plgpu.commit_smem()
            group, token = problem.group, refs.items[item, TOKEN]
            for head in range(problem.kv_heads):
                plgpu.copy_smem_to_gmem(
                    line.at[pl.ds(0, group)], refs.out.at[token, pl.ds(head * group, group)]
                )
