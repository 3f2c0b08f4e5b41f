"""The work list of paged decode: the blocks of every (query, KV head), cut evenly over workers."""

import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

BLOCK = 64  # KV tokens that a worker loads and attends at a time


class Queries(NamedTuple):
    """The query tokens to serve: index of the first token, block table row, KV tokens that the last
    one sees (0: padding), and the tokens of an item (None: one each).
    """

    token: Int[Array, " items"]
    row: Int[Array, " items"]
    seen: Int[Array, " items"]
    tokens: Int[Array, " items"] | None = None


class Schedule(NamedTuple):
    """items: token, row, seen, first block, tokens, number of blocks. work: see `schedule`."""

    items: Int[Array, "items 6"]
    work: Int[Array, "workers 14"]


TOKEN, ROW, SEEN, FIRST, TOKENS, BLOCKS = range(6)
ITEM, HEAD, BLOCK0, COUNT, SEGMENTS, BEGAN, ENDED, LAST_ENDED = range(8)
FIRST_ITEM = 8  # and the columns behind it


def schedule(
    queries: Queries,
    kv_heads: int,
    window: int | None,
    workers: int,
    *,
    least: int = 1,
    whole: int = 0,
) -> Schedule:
    """Cut the blocks of all (query, KV head) into even runs, one a worker.

    least: blocks of a run, where there are fewer than `workers` runs. whole: nothing is cut where
    every row has at most so many blocks and there is a worker for each (query, KV head). Nothing is
    cut either where rows are of one length, if that makes no run longer than even ones by a 16th.

    work columns: the item, KV head and block where the run begins, its number of blocks, the number
    of (item, head) segments it touches, the workers in which the row of its first segment began
    and ends, and that in which its last segment's row ends; then the columns of the first item.
    """
    tokens = queries.tokens
    if tokens is None:
        tokens = jnp.ones_like(queries.seen)
    first = jnp.zeros_like(queries.seen)
    if window is not None:
        first = jnp.maximum(queries.seen - tokens + 1 - window, 0) // BLOCK
    blocks = (queries.seen + BLOCK - 1) // BLOCK - first
    blocks = jnp.where(queries.seen > 0, blocks, 0)
    columns = [queries.token, queries.row, queries.seen, first, tokens, blocks]
    items = jnp.stack(columns, axis=1)

    ends = jnp.cumsum(blocks) * kv_heads
    total = ends[-1]
    # No worker between two others is idle.
    busy = jnp.clip((total + least - 1) // least, 1, workers)
    number = jnp.arange(workers + 1, dtype=jnp.int32)
    even = _Even(total, busy)
    cut = even.begin(number)
    longest, rows = blocks.max(), (blocks > 0).sum()
    run = jnp.maximum((rows * kv_heads + workers - 1) // workers * longest, 1)
    is_aligned = longest * rows * kv_heads == total
    is_aligned &= workers * run - total <= total // 16
    cut = jnp.where(is_aligned, jnp.minimum(number * run, total), cut)
    segments, is_whole = blocks.shape[0] * kv_heads, jnp.zeros((), bool)
    if segments <= workers:
        is_whole = longest <= whole
        begins = (ends - blocks * kv_heads)[:, None] + blocks[:, None] * jnp.arange(kv_heads)
        begins = jnp.pad(begins.reshape(-1), (0, workers + 1 - segments), constant_values=0)
        begins = jnp.where(number < segments, begins, total)
        cut = jnp.where(is_whole, begins, cut)

    def locate(block: Int[Array, " workers"]) -> tuple[Array, Array, Array, Array]:
        item = (block[:, None] >= ends).sum(axis=1, dtype=jnp.int32)
        item = jnp.minimum(item, blocks.shape[0] - 1)
        within = block - (ends[item] - blocks[item] * kv_heads)
        size = jnp.maximum(blocks[item], 1)
        return item, within // size, within % size, size

    def holder(block: Int[Array, " workers"]) -> Int[Array, " workers"]:
        cut_evenly = even.holder(block)
        return jnp.where(is_whole, number[:-1], jnp.where(is_aligned, block // run, cut_evenly))

    start, count = cut[:-1], cut[1:] - cut[:-1]
    last = jnp.maximum(cut[1:] - 1, 0)
    item, head, block, size = locate(start)
    last_item, last_head, last_block, last_size = locate(last)
    segments = (last_item - item) * kv_heads + last_head - head + 1
    columns = [
        *(item, head, block, count, jnp.where(count > 0, segments, 0)),
        *(holder(start - block), holder(start - block + size - 1)),
        holder(last - last_block + last_size - 1),
    ]
    work = jnp.concatenate([jnp.stack(columns, axis=1), items[item]], axis=1)
    return Schedule(items=items.astype(jnp.int32), work=work.astype(jnp.int32))


class _Even(NamedTuple):
    """So many blocks in as many even runs. The product of both may be more than int32 holds."""

    total: Any
    runs: Any

    def begin(self, run: Array) -> Array:
        """total * run // runs: the block where a run begins; those past the last have none."""
        run = jnp.minimum(run, self.runs)
        return run * (self.total // self.runs) + run * (self.total % self.runs) // self.runs

    def holder(self, block: Array) -> Array:
        """The run that has a block: as fractions say, which are at most one off, and then right."""
        share = self.runs / jnp.maximum(self.total, 1).astype(jnp.float32)
        run = (block.astype(jnp.float32) * share).astype(jnp.int32)
        return run + (self.begin(run + 1) <= block) - (self.begin(run) > block)


class Segment(NamedTuple):
    """A run of blocks of one item and KV head: blocks [block, block + count) of its blocks."""

    item: Any
    head: Any
    block: Any
    count: Any
    done: Any  # blocks that the worker has walked before this segment
    columns: tuple[Any, ...]  # of the item, if they were asked for


def walk(
    items: Any, work: Any, worker: Any, kv_heads: int, visit: Any, *, known: bool = False
) -> None:
    """Call visit(segment) for each segment of a worker's run that has blocks.

    known: work has the columns of each run's first item, as `schedule` gives it, and segments get
    those of theirs.
    """
    names = (TOKEN, ROW, SEEN, FIRST, TOKENS, BLOCKS) if known else (BLOCKS,)

    def step(_: Any, at: tuple[Any, ...]) -> tuple[Any, ...]:
        item, head, block, left, done, *columns = at
        count = jnp.minimum(columns[-1] - block, left)
        wraps = head + 1 == kv_heads
        item_after = jnp.where(wraps, item + 1, item)
        # Asked for before the visit, at whose end they are there.
        inside = jnp.minimum(item_after, items.shape[0] - 1)
        columns_after = [items[inside, column] for column in names]

        @pl.when(count > 0)
        def _visit() -> None:
            visit(Segment(item, head, block, count, done, tuple(columns)))

        head = jnp.where(wraps, 0, head + 1)
        return item_after, head, jnp.int32(0), left - count, done + count, *columns_after

    item, head, block, count = (work[worker, column] for column in (ITEM, HEAD, BLOCK0, COUNT))
    columns = [work[worker, FIRST_ITEM + each] if known else items[item, each] for each in names]
    # All columns are asked for at once: behind the loop's branch they would be waited for again.
    together = functools.reduce(operator.or_, (item, head, block, *columns))
    segments = jnp.where(together >= 0, work[worker, SEGMENTS], 0)
    lax.fori_loop(0, segments, step, (item, head, block, count, jnp.int32(0), *columns))
