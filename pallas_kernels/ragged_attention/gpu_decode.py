"""Paged decode on Hopper: the batch's KV is one line of blocks, cut evenly over persistent workers.

A worker is a pair of warpgroups: one streams KV blocks through shared memory, the other attends.
Cuts fall anywhere, so a worker's first and last segments may be parts of a longer row: those go to
scratch memory as partial results, and the worker that is last to finish a row joins them.
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
from pallas_kernels.ragged_attention.gpu_attend import Worker, attend
from pallas_kernels.ragged_attention.gpu_join import join_ended, join_stages, part_arrays
from pallas_kernels.ragged_attention.gpu_problem import Problem
from pallas_kernels.ragged_attention.gpu_schedule import (
    BLOCK,
    COUNT,
    FIRST,
    ROW,
    SEEN,
    Queries,
    Segment,
    schedule,
    walk,
)
from pallas_kernels.ragged_attention.gpu_softmax import ROWS, swizzled

_PIECE = 16  # tokens: the last block of a row is loaded in multiples of it
_SMALL = 4096  # bytes of shared memory for barriers and what is aligned
_LEAST = 2  # blocks of a run: fewer are not worth another part
_WHOLE = 4  # blocks of a row that one worker attends sooner than several join their parts


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """workers in all; pairs: workers of one SM; slots: blocks of K or V in flight per worker.

    tokens: the most of one row that are attended together; where it is more than 1, rows that have
    more, and padding, are left to others.
    """

    workers: int
    pairs: int
    slots: int
    tokens: int = 1


def decode_plan(head_dim: int, sms: int, shared_memory: int, tokens: int = 1) -> DecodePlan:
    """Two workers an SM where registers allow it, and the slots that shared memory holds."""
    pairs = 2 if head_dim <= 128 else 1
    room = (shared_memory - _SMALL) // pairs - 3 * ROWS * head_dim * 2
    logs = ROWS * 4 // 2  # of the parts that are joined, two tiles at a time
    slots = min(room // (BLOCK * head_dim * 2 + logs), 12)
    return DecodePlan(workers=pairs * sms, pairs=pairs, slots=slots, tokens=tokens)


def _per_row(per_head: Float[Array, " heads"], problem: Problem) -> Float[Array, "kv_heads rows"]:
    """Each KV head's query heads, for every token of an item, padded to the rows of a tile."""
    grouped = per_head.astype(jnp.float32).reshape(problem.kv_heads, problem.group)
    grouped = jnp.pad(grouped, ((0, 0), (0, problem.stride - problem.group)))
    rows = jnp.tile(grouped, (1, problem.tokens))
    return jnp.pad(rows, ((0, 0), (0, ROWS - rows.shape[1])))


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
    out: Float[Array, "tokens heads head"] | None = None,
) -> Float[Array, "tokens heads head"]:
    """Attention of the queries over their pages, written into `out` if that is given."""
    runs = schedule(
        queries, problem.kv_heads, problem.window, plan.workers, least=_LEAST, whole=_WHOLE
    )
    named = {
        "q": q,
        "keys": pages.keys,
        "values": pages.values,
        "table": table,
        "items": runs.items,
        "work": runs.work,
        "arrivals": jnp.zeros((plan.workers,), jnp.int32),
    }
    if sinks is not None:
        named["sinks"] = _per_row(sinks, problem)
    if alibi is not None:
        named["slopes"] = _per_row(alibi, problem)
    out = lax.empty(q.shape, q.dtype) if out is None else out
    written = {"out": out, **part_arrays(problem, plan.workers)}
    named |= {name: jax.new_ref(array) for name, array in written.items()}
    _launch(problem, plan, named)
    if problem.interpret:
        _launch_join(problem, plan, named)
    return jax.freeze(named["out"])


def _scratch(problem: Problem, pairs: int, slots: int) -> dict[str, Any]:
    """Shared memory of the attending warpgroups, and the ring of each pair."""
    stages = join_stages(slots)
    return {
        "line": plgpu.SMEM((pairs, ROWS, problem.head_dim), problem.dtype),
        "ring": swizzled(BLOCK, problem.head_dim, problem.dtype, (pairs * (slots + 2),)),
        "logs": plgpu.SMEM((stages, pairs, ROWS), jnp.float32),
        "fetched": plgpu.Barrier(num_arrivals=3, num_barriers=pairs * stages),
    }


def _given(names: list[str], refs: tuple[Any, ...], pairs: int, slots: int) -> SimpleNamespace:
    """The refs by name; queries and spare [pairs, ROWS, head] are the tiles behind the rings."""
    given = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    given.queries = given.ring.at[pl.ds(pairs * slots, pairs)]
    given.spare = given.ring.at[pl.ds(pairs * (slots + 1), pairs)]
    return given


def _launch(problem: Problem, plan: DecodePlan, named: dict[str, Any]) -> None:
    slots = plan.pairs * plan.slots
    scratch = _scratch(problem, plan.pairs, plan.slots) | {
        "full": plgpu.Barrier(num_barriers=slots),
        "free": plgpu.Barrier(num_barriers=slots),
        "ready": plgpu.Barrier(num_arrivals=problem.tokens, num_barriers=plan.pairs),
        "ticket": plgpu.SMEM((2, plan.pairs), jnp.int32),
    }

    def ragged_decode(*refs: Any) -> None:
        given = _given([*named, *scratch], refs, plan.pairs, plan.slots)
        warpgroup = lax.axis_index("warpgroup")
        pair = lax.rem(warpgroup, jnp.int32(plan.pairs))
        number = lax.axis_index("sm") * plan.pairs + pair
        worker = Worker(problem, plan.slots, plan.workers, given, pair, number)

        @pl.when(warpgroup < plan.pairs)
        def _attend() -> None:
            if plan.pairs > 1:
                plgpu.set_max_registers(216, action="increase")
            attend(worker)

        @pl.when(warpgroup >= plan.pairs)
        def _load() -> None:
            if plan.pairs > 1:
                plgpu.set_max_registers(40, action="decrease")
            _stream(worker)

    plgpu.kernel(
        ragged_decode,
        scratch_types=list(scratch.values()),
        grid=(plan.workers // plan.pairs,),
        grid_names=("sm",),
        num_threads=2 * plan.pairs,
        thread_name="warpgroup",
        # Rows of a tile are summed within a warp, without shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=problem.interpret,
    )(*named.values())


def _launch_join(problem: Problem, plan: DecodePlan, named: dict[str, Any]) -> None:
    scratch = _scratch(problem, 1, plan.slots)

    def body(*refs: Any) -> None:
        given = _given([*named, *scratch], refs, 1, plan.slots)
        join_ended(problem, given, lax.axis_index("worker"), plan.slots)

    plgpu.kernel(
        body,
        scratch_types=list(scratch.values()),
        grid=(plan.workers,),
        grid_names=("worker",),
        interpret=problem.interpret,
    )(*named.values())


def page_slice(problem: Problem, table: Any, row: Any, block: Any, head: Any) -> tuple[Any, ...]:
    """Where one block of one head begins in the pages."""
    per_page = problem.page_size // BLOCK
    page = table[row, block // per_page]
    offset = pl.multiple_of(block % per_page * BLOCK, BLOCK)
    return page, head, offset


def _stream(at: Worker) -> None:
    """The loading warpgroup: K and V of every block of the run, in order, as slots come free."""
    problem, refs, slots = at.problem, at.refs, at.slots

    def put(pages: Any, index: tuple[Any, ...], left: Any, use: Any) -> None:
        slot = at.slot(use)

        @pl.when(use >= slots)
        def _reuse() -> None:
            plgpu.barrier_wait(refs.free.at[slot])

        page, head, offset = index
        # Of a row's last block only what is needed: the rest is masked, whatever it is.
        for rows in range(_PIECE, BLOCK + 1, _PIECE):
            fits = (left > rows - _PIECE) & ((left <= rows) | (rows == BLOCK))
            source = pages.at[page, head, pl.ds(offset, rows)]
            target = refs.ring.at[slot, pl.ds(0, rows)]
            pl.when(fits)(partial(plgpu.copy_gmem_to_smem, source, target, refs.full.at[slot]))

    def load(segment: Segment) -> None:
        row = segment.columns[ROW]
        first = segment.columns[FIRST] + segment.block

        @pl.loop(0, segment.count)
        def _block(i: Any) -> None:
            index = page_slice(problem, refs.table, row, first + i, segment.head)
            left = segment.columns[SEEN] - (first + i) * BLOCK
            put(refs.keys, index, left, 2 * (segment.done + i))
            put(refs.values, index, left, 2 * (segment.done + i) + 1)

    walk(refs.items, refs.work, at.number, problem.kv_heads, load, known=True)
    uses = 2 * refs.work[at.number, COUNT]

    @pl.loop(jnp.maximum(uses - slots, 0), uses)  # every release must be seen before the end
    def _drain(use: Any) -> None:
        plgpu.barrier_wait(refs.free.at[at.slot(use)])
