"""The work list of paged decode: the blocks of every (query, KV head), cut evenly over workers."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

BLOCK = 64  # KV tokens that a worker loads and attends at a time


class Queries(NamedTuple):
    """The query tokens to serve: token index, block table row, KV tokens seen (0: padding)."""

    token: Int[Array, " items"]
    row: Int[Array, " items"]
    seen: Int[Array, " items"]


class Schedule(NamedTuple):
    """items: token, row, seen, first block, number of blocks. work: see `schedule`."""

    items: Int[Array, "items 5"]
    work: Int[Array, "workers 8"]


TOKEN, ROW, SEEN, FIRST, BLOCKS = range(5)
ITEM, HEAD, BLOCK0, COUNT, SEGMENTS, BEGAN = range(6)


def schedule(queries: Queries, kv_heads: int, window: int | None, workers: int) -> Schedule:
    """Cut the blocks of all (query, KV head) into even runs, one a worker.

    work columns: the item, KV head and block where the run begins, its number of blocks, the number
    of (item, head) segments it touches, and the worker in which its first segment began.
    """
    first = 0 * queries.seen
    if window is not None:
        first = jnp.maximum(queries.seen - window, 0) // BLOCK
    blocks = (queries.seen + BLOCK - 1) // BLOCK - first
    blocks = jnp.where(queries.seen > 0, blocks, 0)
    items = jnp.stack([queries.token, queries.row, queries.seen, first, blocks], axis=1)

    ends = jnp.cumsum(blocks) * kv_heads
    total = ends[-1]
    # With fewer blocks than workers, one block each: no worker between two others is idle.
    busy = jnp.clip(total, 1, workers)
    cut = jnp.minimum(jnp.arange(workers + 1, dtype=jnp.int32), busy) * total // busy

    def locate(block: Int[Array, " workers"]) -> tuple[Array, Array, Array]:
        item = (block[:, None] >= ends).sum(axis=1, dtype=jnp.int32)
        item = jnp.minimum(item, blocks.shape[0] - 1)
        within = block - (ends[item] - blocks[item] * kv_heads)
        size = jnp.maximum(blocks[item], 1)
        return item, within // size, within % size

    start, count = cut[:-1], cut[1:] - cut[:-1]
    item, head, block = locate(start)
    last_item, last_head, _ = locate(jnp.maximum(cut[1:] - 1, 0))
    segments = (last_item - item) * kv_heads + last_head - head + 1
    # The worker that holds block b is ceil((b + 1) * busy / total) - 1.
    began = ((start - block + 1) * busy - 1) // jnp.maximum(total, 1)
    zero = jnp.zeros_like(item)
    columns = [item, head, block, count, jnp.where(count > 0, segments, 0), began, zero, zero]
    return Schedule(items=items, work=jnp.stack(columns, axis=1))


class Segment(NamedTuple):
    """A run of blocks of one item and KV head: blocks [block, block + count) of its blocks."""

    item: Any
    head: Any
    block: Any
    count: Any
    done: Any  # blocks that the worker has walked before this segment


def walk(items: Any, work: Any, worker: Any, kv_heads: int, visit: Any) -> None:
    """Call visit(segment) for each segment of a worker's run that has blocks."""

    def step(_: Any, at: tuple[Any, ...]) -> tuple[Any, ...]:
        item, head, block, left, done = at
        count = jnp.minimum(items[item, BLOCKS] - block, left)

        @pl.when(count > 0)
        def _visit() -> None:
            visit(Segment(item, head, block, count, done))

        wraps = head + 1 == kv_heads
        item, head = jnp.where(wraps, item + 1, item), jnp.where(wraps, 0, head + 1)
        return item, head, jnp.int32(0), left - count, done + count

    start = tuple(work[worker, column] for column in (ITEM, HEAD, BLOCK0, COUNT))
    lax.fori_loop(0, work[worker, SEGMENTS], step, (*start, jnp.int32(0)))
