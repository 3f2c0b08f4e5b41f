"""The TPU kernel: items in order, each over its own pages, two blocks of pages in flight.

Online softmax (Milakov and Gimelshein, arXiv:1805.02867). While one block is computed the next is
on its way, also over the border between items: the chip's memory never waits for a new sequence.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.pages import LANES, whole_lanes
from pallas_kernels.ragged_attention import tpu_chip
from pallas_kernels.ragged_attention.tpu_items import Items

_MASKED = -1e30
"""Far below any score, and still finite: the difference of two of them is zero, not NaN."""


@dataclass(frozen=True, slots=True)
class TPUPlan:
    """block: query tokens of an item. pages: of one fetched block of keys and values."""

    block: int
    pages: int


@dataclass(frozen=True, slots=True)
class Row:
    """What lies in a row of a page: its first `key` lanes meet the queries, lanes [low, high) are
    what the weights mix. All are multiples of 128.
    """

    lanes: int
    key: int
    low: int
    high: int

    @classmethod
    def of(cls, lanes: int, *, key: int, value: int, width: int) -> "Row":
        """The key is that wide, and `width` channels from lane `value` on are the value."""
        return cls(lanes, whole_lanes(key), value // LANES * LANES, whole_lanes(value + width))

    @property
    def mixed(self) -> int:
        """Lanes of an output."""
        return self.high - self.low


@dataclass(frozen=True, slots=True)
class Options:
    """What attention is told, as ragged_attention says it."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Float[Array, " heads"] | None = None
    alibi: Float[Array, " heads"] | None = None


def plan_for(*, group: int, kv_heads: int, row: Row, page_size: int, itemsize: int) -> TPUPlan:
    """The largest plan that fits the chip's vector memory.

    Queries first, for each block of them reads the keys once more; then pages, up to 512 keys, by
    when a fetch takes much longer than its latency. `vmem` tells whether even the smallest fits.
    """
    plan = TPUPlan(block=max(1, min(128, 512 // group)), pages=max(1, 512 // page_size))
    while vmem(plan, group, kv_heads, row, page_size, itemsize) > tpu_chip.planned():
        if plan.block * group >= plan.pages * page_size and plan.block > 8:
            plan = TPUPlan(max(8, plan.block // 2), plan.pages)
        elif plan.pages > 1:
            plan = TPUPlan(plan.block, plan.pages // 2)
        elif plan.block > 1:
            plan = TPUPlan(plan.block // 2, plan.pages)
        else:
            break
    return plan


def vmem(plan: TPUPlan, group: int, kv_heads: int, row: Row, page_size: int, itemsize: int) -> int:
    """Bytes of a plan's buffers and of the values of one KV head."""
    rows, keys = max(8, plan.block * group), plan.pages * page_size
    fetched = 2 * kv_heads * keys * row.lanes * itemsize
    queries = 2 * kv_heads * rows * (row.key + row.mixed) * itemsize
    running = kv_heads * rows * (row.mixed + 2 * LANES) * 4
    scores = 4 * rows * max(LANES, keys) * 4
    masked = keys * row.mixed * itemsize
    return fetched + queries + running + scores + masked


@dataclass(frozen=True, slots=True)
class _Problem:
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: bool
    alibi: bool
    row: Row
    table: int
    pages: int
    page_size: int
    precision: lax.Precision | None

    @property
    def block(self) -> int:
        """Keys of one fetched block."""
        return self.pages * self.page_size


def attend_items(
    q: Float[Array, "items kv_heads queries key"],
    pool: Float[Array, "pages kv_heads page lanes"],
    row: Row,
    block_table: Int[Array, "rows blocks"],
    items: Items,
    plan: TPUPlan,
    options: Options,
    *,
    interpret: Any,
) -> Float[Array, "items kv_heads queries mixed"]:
    """Attention of every live item; the others' outputs are not written."""
    _, kv_heads, queries, _ = q.shape
    problem = _Problem(
        scale=options.scale,
        window=options.window,
        soft_cap=options.soft_cap,
        sinks=options.sinks is not None,
        alibi=options.alibi is not None,
        row=row,
        table=block_table.shape[1],
        pages=plan.pages,
        page_size=pool.shape[2],
        precision=lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
    )
    group = queries // plan.block

    def per_query(per_head: Float[Array, " heads"] | None) -> Float[Array, "..."]:
        if per_head is None:
            return jnp.zeros((1, 1, 1), jnp.float32)  # never read
        grouped = per_head.astype(jnp.float32).reshape(kv_heads, 1, group)
        each = jnp.broadcast_to(grouped, (kv_heads, plan.block, group))
        return each.reshape(kv_heads, queries, 1)

    offset = jnp.repeat(jnp.arange(plan.block, dtype=jnp.int32), group)[:, None]
    last = jnp.maximum(items.live - 1, 0)

    sink_logits, slopes = per_query(options.sinks), per_query(options.alibi)
    return pl.pallas_call(
        functools.partial(_kernel, problem),
        grid_spec=_grid(problem, q.shape, sink_logits.shape, slopes.shape, dtype=pool.dtype),
        out_shape=jax.ShapeDtypeStruct((*q.shape[:3], row.mixed), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=tpu_chip.limit()
        ),
        interpret=interpret,
        name="ragged_attention",
    )(
        block_table.reshape(-1),  # scalar memory would fill the rest of each row's 128 lanes
        items.row,
        items.first,
        items.count,
        items.live[None],
        last[None],
        q,
        pool,
        offset,
        sink_logits,
        slopes,
    )


def _grid(
    problem: _Problem,
    shape: tuple[int, ...],
    sinks: tuple[int, ...],
    slopes: tuple[int, ...],
    *,
    dtype: Any,
) -> pltpu.PrefetchScalarGridSpec:
    """One program an item; queries and outputs come and go by themselves, pages by hand."""
    count, kv_heads, queries, key = shape
    mixed = problem.row.mixed

    def item(i: Any, *scalars: Any) -> tuple[Any, int, int, int]:
        last_live = scalars[-1]  # items past it name it again: nothing more is fetched
        return (jnp.minimum(i, last_live[0]), 0, 0, 0)

    whole = lambda *_: (0, 0, 0)
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=6,
        grid=(count,),
        in_specs=[
            pl.BlockSpec((1, kv_heads, queries, key), item),
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec((queries, 1), lambda *_: (0, 0)),
            pl.BlockSpec(sinks, whole),
            pl.BlockSpec(slopes, whole),
        ],
        out_specs=pl.BlockSpec((1, kv_heads, queries, mixed), item),
        scratch_shapes=[
            pltpu.VMEM((2, kv_heads, problem.block, problem.row.lanes), dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SMEM((1,), jnp.int32),
            pltpu.VMEM((kv_heads, queries, 1), jnp.float32),
            pltpu.VMEM((kv_heads, queries, 1), jnp.float32),
            pltpu.VMEM((kv_heads, queries, mixed), jnp.float32),
        ],
    )


def _kernel(
    problem: _Problem,
    table: Any,
    row: Any,
    first: Any,
    count: Any,
    live: Any,
    last: Any,
    q: Any,
    pool: Any,
    offset: Any,
    sinks: Any,
    alibi: Any,
    out: Any,
    buffer: Any,
    arrived: Any,
    parity: Any,
    highest: Any,
    total: Any,
    mixed: Any,
) -> None:
    del last
    i = pl.program_id(0)
    fetch = _Fetch(problem, table, row, first, count, pool, buffer, arrived)

    @pl.when((i == 0) & (live[0] > 0))
    def _() -> None:
        parity[0] = 0
        fetch.start(0, fetch.begin(0), 0)

    @pl.when(i < live[0])
    def _() -> None:
        highest[...] = sinks[...] if problem.sinks else jnp.full_like(highest, _MASKED)
        total[...] = jnp.full_like(total, 1.0 if problem.sinks else 0.0)
        mixed[...] = jnp.zeros_like(mixed)
        end = fetch.end(i)
        following = jnp.minimum(i + 1, live[0] - 1)

        def step(block: Any, carry: None) -> None:
            slot = parity[0]
            here = block + 1 < end
            more = here | (i + 1 < live[0])

            @pl.when(more)
            def _() -> None:
                item = jnp.where(here, i, following)
                fetch.start(item, jnp.where(here, block + 1, fetch.begin(following)), 1 - slot)

            fetch.wait(i, block, slot)
            _accumulate(
                problem,
                block,
                first[i],
                count[i],
                q,
                buffer.at[slot],
                offset,
                alibi,
                highest,
                total,
                mixed,
            )
            parity[0] = 1 - slot
            return carry

        lax.fori_loop(fetch.begin(i), end, step, None)
        out[0] = (mixed[...] / jnp.maximum(total[...], 1e-30)).astype(out.dtype)


class _Fetch:
    """Copies of the pages of one block of one item; only pages that the item sees are touched."""

    def __init__(
        self,
        problem: _Problem,
        table: Any,
        row: Any,
        first: Any,
        count: Any,
        pool: Any,
        buffer: Any,
        arrived: Any,
    ) -> None:
        self.problem = problem
        self.table, self.row, self.first, self.count = table, row, first, count
        self.pool, self.buffer, self.arrived = pool, buffer, arrived

    def lowest(self, item: Any) -> Any:
        """The first position that any of the item's queries sees."""
        window = self.problem.window
        return 0 if window is None else jnp.maximum(self.first[item] - window + 1, 0)

    def begin(self, item: Any) -> Any:
        """The item's first block."""
        return self.lowest(item) // self.problem.block

    def end(self, item: Any) -> Any:
        """One past its last block."""
        return pl.cdiv(self.first[item] + self.count[item], self.problem.block)

    def start(self, item: Any, block: Any, slot: Any) -> None:
        self._each_page(item, block, slot, lambda copy: copy.start())

    def wait(self, item: Any, block: Any, slot: Any) -> None:
        self._each_page(item, block, slot, lambda copy: copy.wait())

    def _each_page(self, item: Any, block: Any, slot: Any, act: Any) -> None:
        size = self.problem.page_size
        lowest, beyond = self.lowest(item), self.first[item] + self.count[item]
        for number in range(self.problem.pages):
            index = block * self.problem.pages + number

            @pl.when((index * size < beyond) & ((index + 1) * size > lowest))
            def _(index: Any = index, number: int = number) -> None:
                page = self.table[self.row[item] * self.problem.table + index]
                place = self.buffer.at[slot, :, pl.ds(number * size, size)]
                act(pltpu.make_async_copy(self.pool.at[page], place, self.arrived.at[slot]))


def _accumulate(
    problem: _Problem,
    block: Any,
    first: Any,
    count: Any,
    q: Any,
    rows: Any,
    offset: Any,
    alibi: Any,
    highest: Any,
    total: Any,
    mixed: Any,
) -> None:
    """One block of keys and values into the running softmax of each KV head."""
    queries, lanes = q.shape[2], problem.row
    key = block * problem.block + lax.broadcasted_iota(jnp.int32, (queries, problem.block), 1)
    query = first + offset[...]
    seen = key <= query
    owned = block * problem.block + lax.broadcasted_iota(jnp.int32, (problem.block, 1), 0)
    held = owned < first + count
    if problem.window is not None:
        seen &= key > query - problem.window
        held &= owned > first - problem.window

    def one_head(head: Any, carry: None) -> None:
        # What lies in pages behind the last token, or was never fetched, may be NaN.
        value = jnp.where(held, rows[head, :, lanes.low : lanes.high], 0)
        scores = problem.scale * lax.dot_general(
            q[0, head],
            rows[head, :, : lanes.key],
            (((1,), (1,)), ((), ())),
            precision=problem.precision,
            preferred_element_type=jnp.float32,
        )
        if problem.soft_cap is not None:
            scores = problem.soft_cap * jnp.tanh(scores / problem.soft_cap)
        if problem.alibi:
            scores += alibi[head] * (key - query).astype(jnp.float32)
        scores = jnp.where(seen, scores, _MASKED)
        before = highest[head]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - now), 0)
        kept = jnp.exp(before - now)
        highest[head] = now
        total[head] = kept * total[head] + jnp.sum(weights, axis=1, keepdims=True)
        mixed[head] = kept * mixed[head] + lax.dot_general(
            weights.astype(value.dtype),
            value,
            (((1,), (0,)), ((), ())),
            precision=problem.precision,
            preferred_element_type=jnp.float32,
        )
        return carry

    lax.fori_loop(0, q.shape[1], one_head, None)
