"""Paged decode on Hopper: the batch's KV is one line of blocks, cut evenly over persistent workers.

A worker is a pair of warpgroups: one streams KV blocks through shared memory, the other attends.
Cuts fall anywhere, so a worker's first and last segments may be parts of a longer row: those go to
scratch memory as partial results, and a second small kernel combines them.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.pages import KVPages
from pallas_kernels.ragged_attention.gpu_combine import PARTS, combine
from pallas_kernels.ragged_attention.gpu_problem import Problem
from pallas_kernels.ragged_attention.gpu_schedule import (
    BLOCK,
    BLOCKS,
    COUNT,
    FIRST,
    ROW,
    SEEN,
    TOKEN,
    Queries,
    Segment,
    schedule,
    walk,
)
from pallas_kernels.ragged_attention.gpu_softmax import (
    LOG2E,
    MASKED,
    PER_ROW,
    ROWS,
    TILE,
    Softmax,
    accumulate,
    advance,
    clear_rows_from,
    fresh,
    row_vector,
    scores,
    spread,
    swizzled,
    to_log2,
)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """workers in all; pairs: workers of one SM; slots: blocks of K or V in flight per worker."""

    workers: int
    pairs: int
    slots: int


def decode_plan(head_dim: int, sms: int, shared_memory: int) -> DecodePlan:
    """Two workers an SM where registers allow it, and the slots that shared memory holds."""
    pairs = 2 if head_dim <= 128 else 1
    room = (shared_memory - 4096) // pairs - 2 * ROWS * head_dim * 2
    slots = min(room // (BLOCK * head_dim * 2), 12)
    return DecodePlan(workers=pairs * sms, pairs=pairs, slots=slots)


def _per_row(per_head: Float[Array, " heads"], problem: Problem) -> Float[Array, "kv_heads rows"]:
    """Each KV head's query heads, padded to the rows of a tile."""
    grouped = per_head.astype(jnp.float32).reshape(problem.kv_heads, problem.group)
    return jnp.pad(grouped, ((0, 0), (0, ROWS - problem.group)))


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("problem", "plan"))
def decode(
    q: Float[Array, "tokens heads head"],
    pages: KVPages,
    table: Int[Array, "rows blocks"],
    queries: Queries,
    problem: Problem,
    plan: DecodePlan,
    *,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, " heads"] | None,
) -> Float[Array, "tokens heads head"]:
    """Attention of single query tokens over their pages; one item for every token of q."""
    schedules = schedule(queries, problem.kv_heads, problem.window, plan.workers)
    shape = (2 * plan.workers, len(PARTS), problem.padded_group, problem.head_dim)
    out, parts = (jax.new_ref(lax.empty(each, q.dtype)) for each in (q.shape, shape))
    named = {
        "q": q,
        "keys": pages.keys,
        "values": pages.values,
        "table": table,
        "items": schedules.items,
        "work": schedules.work,
        "out": out,
        "parts": parts,
    }
    wide_sinks = None
    if sinks is not None:
        named["sinks"] = _per_row(sinks, problem)
        narrow = named["sinks"][:, : problem.padded_group, None]
        wide_sinks = jnp.broadcast_to(narrow, (*narrow.shape[:2], problem.head_dim))
    if alibi is not None:
        named["slopes"] = _per_row(alibi, problem)

    def body(*refs: Any) -> None:
        given = dict(zip(named, refs, strict=False))
        scratch = ("line", "queries", "ring", "full", "free", "ready")
        given.update(zip(scratch, refs[len(named) :], strict=True))
        warpgroup = lax.axis_index("warpgroup")
        pair = lax.rem(warpgroup, jnp.int32(plan.pairs))
        worker = lax.axis_index("sm") * plan.pairs + pair
        common = (problem, plan, SimpleNamespace(**given), pair, worker)
        pl.when(warpgroup < plan.pairs)(lambda: _attend(*common))
        pl.when(warpgroup >= plan.pairs)(lambda: _stream(*common))

    slots = plan.pairs * plan.slots
    plgpu.kernel(
        body,
        scratch_types=[
            plgpu.SMEM((plan.pairs, ROWS, problem.head_dim), problem.dtype),
            swizzled(ROWS, problem.head_dim, problem.dtype, (plan.pairs,)),
            swizzled(BLOCK, problem.head_dim, problem.dtype, (slots,)),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=plan.pairs),
        ],
        grid=(plan.workers // plan.pairs,),
        grid_names=("sm",),
        num_threads=2 * plan.pairs,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=problem.interpret,
    )(*named.values())
    combine(problem, out, schedules, parts, wide_sinks)
    return jax.freeze(out)


def page_slice(problem: Problem, table: Any, row: Any, block: Any, head: Any) -> tuple[Any, ...]:
    """Index of one block of one head in the pages."""
    per_page = problem.page_size // BLOCK
    page = table[row, block // per_page]
    offset = pl.multiple_of(block % per_page * BLOCK, BLOCK)
    return page, head, pl.ds(offset, BLOCK)


def _stream(problem: Problem, plan: DecodePlan, refs: Any, pair: Any, worker: Any) -> None:
    """The loading warpgroup: K and V of every block of the run, in order, as slots come free."""
    if plan.pairs > 1:
        plgpu.set_max_registers(40, action="decrease")
    slots = plan.slots

    def put(pages: Any, index: Any, use: Any) -> None:
        slot = pair * slots + lax.rem(use, jnp.int32(slots))

        @pl.when(use >= slots)
        def _reuse() -> None:
            plgpu.barrier_wait(refs.free.at[slot])

        plgpu.copy_gmem_to_smem(pages.at[index], refs.ring.at[slot], refs.full.at[slot])

    def load(segment: Segment) -> None:
        row = refs.items[segment.item, ROW]
        first = refs.items[segment.item, FIRST] + segment.block

        @pl.loop(0, segment.count)
        def _block(i: Any) -> None:
            index = page_slice(problem, refs.table, row, first + i, segment.head)
            put(refs.keys, index, 2 * (segment.done + i))
            put(refs.values, index, 2 * (segment.done + i) + 1)

    walk(refs.items, refs.work, worker, problem.kv_heads, load)
    uses = 2 * refs.work[worker, COUNT]

    @pl.loop(jnp.maximum(uses - slots, 0), uses)  # every release must be seen before the end
    def _drain(use: Any) -> None:
        plgpu.barrier_wait(refs.free.at[pair * slots + lax.rem(use, jnp.int32(slots))])


def _in_two(value: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """A float32 as the sum of two numbers of a narrower type."""
    high = value.astype(dtype)
    return high, (value - high.astype(jnp.float32)).astype(dtype)


def _attend(problem: Problem, plan: DecodePlan, refs: Any, pair: Any, worker: Any) -> None:
    """The computing warpgroup."""
    if plan.pairs > 1:
        plgpu.set_max_registers(216, action="increase")
    group, head_dim = problem.group, problem.head_dim

    def slot(use: Any) -> Any:
        return pair * plan.slots + lax.rem(use, jnp.int32(plan.slots))

    def compute(segment: Segment) -> None:
        token, seen = refs.items[segment.item, TOKEN], refs.items[segment.item, SEEN]
        first = refs.items[segment.item, FIRST] + segment.block
        mine = pl.ds(segment.head * group, group)
        plgpu.copy_gmem_to_smem(
            refs.q.at[token, mine], refs.line.at[pair, pl.ds(0, group)], refs.ready.at[pair]
        )
        plgpu.barrier_wait(refs.ready.at[pair])
        queries = refs.queries.at[pair]
        queries[...] = plgpu.load(refs.line.at[pair], layout=TILE, optimized=False)
        plgpu.commit_smem()
        slopes = None
        if problem.alibi:
            slopes = plgpu.load(refs.slopes.at[segment.head], layout=PER_ROW, optimized=False)

        def block(i: Any, state: Softmax) -> Softmax:
            use = 2 * (segment.done + i)
            plgpu.barrier_wait(refs.full.at[slot(use)])
            raw = scores(queries, refs.ring.at[slot(use)], BLOCK)
            plgpu.barrier_arrive(refs.free.at[slot(use)])
            at = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=TILE)
            at += (first + i) * BLOCK
            bias = None
            if slopes is not None:
                distance = (at - (seen - 1)).astype(jnp.float32)
                bias = lambda: spread(slopes, BLOCK) * distance
            value, factor = to_log2(raw, problem.scale, problem.soft_cap, bias)
            visible = at < seen
            if problem.window is not None:
                visible &= at >= seen - problem.window
            weights, state = advance(state, jnp.where(visible, value, MASKED), factor)
            values = refs.ring.at[slot(use + 1)]
            plgpu.barrier_wait(refs.full.at[slot(use + 1)])
            clear_rows_from(values, seen - (first + i) * BLOCK, BLOCK, head_dim)
            weights = weights.astype(problem.dtype)
            out = accumulate(state.out, weights, values, bool(problem.interpret))
            plgpu.barrier_arrive(refs.free.at[slot(use + 1)])
            return state._replace(out=out)

        state = lax.fori_loop(0, segment.count, block, fresh(head_dim))
        began, ends = segment.block == 0, segment.block + segment.count
        whole = began & (ends == refs.items[segment.item, BLOCKS])

        @pl.when(whole)
        def _store() -> None:
            top, total = state.top, state.total
            fade = row_vector(1.0)
            if problem.sinks:
                sink = plgpu.load(refs.sinks.at[segment.head], layout=PER_ROW, optimized=False)
                top = jnp.maximum(state.top, sink * LOG2E)
                fade = jnp.exp2(state.top - top)
                total = total * fade + jnp.exp2(sink * LOG2E - top)
            out = state.out * spread(fade / total, head_dim)
            refs.line.at[pair][...] = out.astype(problem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(refs.line.at[pair, pl.ds(0, group)], refs.out.at[token, mine])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(~whole)
        def _store_part() -> None:
            index = 2 * worker + began.astype(jnp.int32)
            weight = spread(state.top + jnp.log(state.total) * LOG2E, head_dim)
            values = (
                *_in_two(state.out / spread(state.total, head_dim), problem.dtype),
                *_in_two(weight, problem.dtype),
            )
            for which, value in enumerate(values):
                refs.line.at[pair][...] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    refs.line.at[pair, pl.ds(0, group)],
                    refs.parts.at[index, which, pl.ds(0, group)],
                )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    walk(refs.items, refs.work, worker, problem.kv_heads, compute)
