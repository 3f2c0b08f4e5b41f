"""Ragged prefill on Hopper: two warpgroups of queries share the KV blocks that a third one loads.

The rows of a matrix tile are (token, query head) pairs of one KV head, so that grouped heads share
every block. The two computing warpgroups take turns: one's softmax runs under the other's products.
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
from jaxtyping import Array, Float

from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.ragged_attention.gpu_lines import (
    copy_layout,
    flat,
    line_shape,
    load_queries,
    of_token,
    per_row,
    store,
    whole,
)
from pallas_kernels.ragged_attention.gpu_problem import Problem
from pallas_kernels.ragged_attention.gpu_schedule import BLOCK
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
    spread,
    swizzled,
    to_log2,
)
from pallas_kernels.ragged_attention.gpu_tiles import Tile, deal, make_tiles

_WORKERS = 2  # computing warpgroups


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """sms: blocks of threads; slots: KV blocks (of K or of V) in flight; block: its KV tokens.

    lines: 2 if a tile's queries are loaded before the outputs of the tile before are stored.
    longer_than: rows of so few query tokens are left to another kernel.
    """

    sms: int
    slots: int
    block: int
    lines: int = 2
    longer_than: int = 0


def prefill_plan(head_dim: int, sms: int, shared_memory: int, longer_than: int = 0) -> PrefillPlan:
    """The block, lines and slots that fit beside the query tiles."""
    block = 2 * BLOCK if head_dim <= 128 else BLOCK
    lines = 2 if head_dim <= 192 else 1
    room = shared_memory - 3072 - (1 + lines) * _WORKERS * ROWS * head_dim * 2
    slots = min(room // (block * head_dim * 2), 8)
    return PrefillPlan(sms, slots, block, lines, longer_than)


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("problem", "plan"))
def prefill(
    q: Float[Array, "tokens heads head"],
    pages: KVPages,
    rows: RaggedRows,
    problem: Problem,
    plan: PrefillPlan,
    *,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, " heads"] | None,
) -> Float[Array, "tokens heads head"]:
    """Causal attention of every row's query tokens over its pages."""
    per_worker = ROWS // problem.aligned_group
    work = make_tiles(
        rows,
        q.shape[0],
        per_tile=_WORKERS * per_worker,
        block=plan.block,
        window=problem.window,
        longer_than=plan.longer_than,
    )
    out = jax.new_ref(lax.empty(q.shape, q.dtype))
    named = {
        "q": q,
        "keys": pages.keys,
        "values": pages.values,
        "table": rows.block_table,
        "tiles": work.tiles,
        "counts": work.counts,
        "padding": work.padding,
        "out": out,
    }
    for name, per_head in (("sinks", sinks), ("slopes", alibi)):
        if per_head is not None:
            named[name] = per_row(per_head, problem)

    def ragged_prefill(*refs: Any) -> None:
        given = dict(zip(named, refs, strict=False))
        scratch = ("lines", "queries", "ring", "full", "free", "ready", "read", "turn", "cleared")
        given.update(zip(scratch, refs[len(named) :], strict=True))
        given = SimpleNamespace(**given)
        worker, sm = lax.axis_index("warpgroup"), lax.axis_index("sm")
        pl.when(worker < _WORKERS)(lambda: _compute(problem, plan, given, worker, sm))
        pl.when(worker == _WORKERS)(lambda: _stream(problem, plan, given, sm))

    plgpu.kernel(
        ragged_prefill,
        scratch_types=[
            plgpu.SMEM((_WORKERS, plan.lines, *line_shape(problem)), problem.dtype),
            swizzled(ROWS, problem.head_dim, problem.dtype, (_WORKERS,)),
            swizzled(plan.block, problem.head_dim, problem.dtype, (plan.slots,)),
            plgpu.Barrier(num_arrivals=plan.block // BLOCK, num_barriers=plan.slots),
            plgpu.Barrier(num_arrivals=_WORKERS, num_barriers=plan.slots),
            plgpu.Barrier(
                num_arrivals=1 if whole(problem, q.shape[0]) else per_worker,
                num_barriers=_WORKERS,
            ),
            plgpu.Barrier(num_barriers=_WORKERS),
            plgpu.Barrier(num_arrivals=_WORKERS),
            plgpu.Barrier(),
        ],
        grid=(plan.sms,),
        grid_names=("sm",),
        num_threads=_WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=problem.interpret,
    )(*named.values())
    return jax.freeze(out)


def _stream(problem: Problem, plan: PrefillPlan, refs: Any, sm: Any) -> None:
    """The loading warpgroup: K and V of every tile's blocks, in order, as slots come free."""
    plgpu.set_max_registers(40, action="decrease")
    slots, per_page = plan.slots, problem.page_size // BLOCK

    def put(pages: Any, tile: Tile, block: Any, use: Any) -> None:
        slot = lax.rem(use, jnp.int32(slots))

        @pl.when(use >= slots)
        def _reuse() -> None:
            plgpu.barrier_wait(refs.free.at[slot])

        last = (tile.length - 1) // BLOCK
        for part in range(plan.block // BLOCK):
            # Past the end there is no page: the last block again, which is masked.
            piece = jnp.minimum(block * (plan.block // BLOCK) + part, last)
            page = refs.table[tile.row, piece // per_page]
            offset = pl.multiple_of(piece % per_page * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(
                pages.at[page, tile.head, pl.ds(offset, BLOCK)],
                refs.ring.at[slot, pl.ds(part * BLOCK, BLOCK)],
                refs.full.at[slot],
            )

    def load(tile: Tile, turn: Any, done: Any) -> None:
        def take_queries(worker: int) -> None:
            pl.when(turn > 0)(lambda: plgpu.barrier_wait(refs.read.at[worker]))
            load_queries(problem, refs, worker, tile)

        take_queries(0)

        @pl.loop(tile.first, tile.end)
        def _block(block: Any) -> None:
            use = 2 * (done + block - tile.first)
            put(refs.keys, tile, block, use)
            put(refs.values, tile, block, use + 1)
            # The second warpgroup may need the first's next turn, so a block, to be done with its
            # line: asking for the line any earlier could wait forever.
            pl.when(block == tile.first)(lambda: take_queries(1))

    uses = 2 * deal(refs.tiles, refs.counts, sm, plan.sms, problem.kv_heads, load)

    @pl.loop(jnp.maximum(uses - slots, 0), uses)  # every release must be seen before the end
    def _drain(use: Any) -> None:
        plgpu.barrier_wait(refs.free.at[lax.rem(use, jnp.int32(slots))])

    @pl.when(uses > 0)
    def _last() -> None:
        for worker in range(_WORKERS):
            plgpu.barrier_wait(refs.read.at[worker])


def _compute(problem: Problem, plan: PrefillPlan, refs: Any, worker: Any, sm: Any) -> None:
    """A computing warpgroup: its half of the query tokens of every tile."""
    plgpu.set_max_registers(232, action="increase")

    def take_turn() -> None:
        plgpu.barrier_arrive(refs.turn)
        plgpu.barrier_wait(refs.turn)

    pl.when(worker == 1)(take_turn)  # the second warpgroup stays half a block behind
    visit = partial(_attend_tile, problem, plan, refs, worker, take_turn)
    deal(refs.tiles, refs.counts, sm, plan.sms, problem.kv_heads, visit)
    pl.when(worker == 0)(take_turn)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    pl.when(worker == 0)(lambda: _zero_padding(problem, plan, refs, sm))


def _zero_padding(problem: Problem, plan: PrefillPlan, refs: Any, sm: Any) -> None:
    """Outputs of this SM's share of the padding tokens."""
    group, padding = problem.group, refs.counts[1]

    @pl.when(sm < padding)
    def _some() -> None:
        line = refs.lines.at[0, 0]
        nothing = jnp.zeros((ROWS, problem.head_dim), problem.dtype)
        rows = flat(problem, line)
        rows[...] = plgpu.layout_cast(nothing, copy_layout(problem))
        plgpu.commit_smem()

        @pl.loop(0, (padding - sm + plan.sms - 1) // plan.sms)
        def _token(step: Any) -> None:
            token = refs.padding[sm + step * plan.sms]

            @pl.loop(0, problem.kv_heads)
            def _head(head: Any) -> None:
                plgpu.copy_smem_to_gmem(
                    of_token(problem, line, 0),
                    refs.out.at[token, pl.ds(head * group, group)],
                )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _attend_tile(
    problem: Problem,
    plan: PrefillPlan,
    refs: Any,
    worker: Any,
    take_turn: Any,
    tile: Tile,
    turn: Any,
    done: Any,
) -> None:
    """One tile: take the queries, walk its blocks, store the outputs."""
    per_token = problem.aligned_group
    head_dim, ahead = problem.head_dim, worker * (ROWS // per_token)
    plgpu.barrier_wait(refs.ready.at[worker])
    line, queries = flat(problem, refs.lines.at[worker, 0]), refs.queries.at[worker]
    queries[...] = plgpu.load(line, layout=copy_layout(problem), optimized=False)
    plgpu.commit_smem()
    if plan.lines > 1:
        plgpu.barrier_arrive(refs.read.at[worker])

    def query() -> jax.Array:
        """Positions of the rows' tokens within the tile."""
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS, plan.block), 0, layout=TILE)
        return lax.div(row, jnp.int32(per_token))

    def key() -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (ROWS, plan.block), 1, layout=TILE)

    def block(masked: bool, index: Any, state: Softmax) -> Softmax:
        use = 2 * (done + index - tile.first)
        slot = lambda use: lax.rem(use, jnp.int32(plan.slots))
        keys, values = refs.ring.at[slot(use)], refs.ring.at[slot(use + 1)]
        plgpu.barrier_wait(refs.full.at[slot(use)])
        if masked:
            plgpu.barrier_wait(refs.full.at[slot(use + 1)])
            _clear_tail(plan, refs, worker, values, tile.length - index * plan.block, head_dim)

        def product(accumulator: Any) -> jax.Array:
            plgpu.wgmma(accumulator, refs.queries.at[worker], keys.transpose((1, 0)))
            take_turn()
            return accumulator[...]

        raw = pl.run_scoped(product, plgpu.ACC((ROWS, plan.block), jnp.float32))
        plgpu.barrier_arrive(refs.free.at[slot(use)])
        shift = tile.position + ahead - index * plan.block
        bias = None
        if problem.alibi:
            slopes = plgpu.load(refs.slopes.at[tile.head], layout=PER_ROW, optimized=False)
            bias = lambda: (
                spread(slopes, plan.block) * (key() - (query() + shift)).astype(jnp.float32)
            )
        value, factor = to_log2(raw, problem.scale, problem.soft_cap, bias)
        if masked:
            visible = key() <= query() + shift
            if problem.window is not None:
                visible &= key() > query() + (shift - problem.window)
            value = jnp.where(visible, value, MASKED)
        weights, state = advance(state, value, factor)
        weights = weights.astype(problem.dtype)
        out, total, top, weights = lax.optimization_barrier(
            (state.out, state.total, state.top, weights)
        )
        plgpu.barrier_arrive(refs.turn)
        if not masked:
            plgpu.barrier_wait(refs.full.at[slot(use + 1)])
        plgpu.barrier_wait(refs.turn)
        out = accumulate(out, weights, values, bool(problem.interpret))
        plgpu.barrier_arrive(refs.free.at[slot(use + 1)])
        return Softmax(out=out, top=top, total=total)

    # Blocks that every query of the tile sees in full need no mask.
    clear_end = jnp.minimum((tile.position + 1) // plan.block, tile.end)
    clear_start = tile.first
    if problem.window is not None:
        last = tile.position + tile.count - 1
        lowest = jnp.maximum(last - problem.window + 1, 0)
        clear_start = jnp.minimum((lowest + plan.block - 1) // plan.block, tile.end)
        clear_end = jnp.maximum(clear_end, clear_start)
    state = fresh(head_dim)
    if problem.window is not None:
        state = lax.fori_loop(tile.first, clear_start, partial(block, True), state)
    state = lax.fori_loop(clear_start, clear_end, partial(block, False), state)
    state = lax.fori_loop(clear_end, tile.end, partial(block, True), state)
    store(problem, plan.lines, refs, worker, state, tile)


def _clear_tail(
    plan: PrefillPlan, refs: Any, worker: Any, values: Any, length: Any, head_dim: int
) -> None:
    """Zero what lies past the row's end: the first warpgroup clears, the second waits for it."""

    @pl.when(length < plan.block)
    def _tail() -> None:
        @pl.when(worker == 0)
        def _clear() -> None:
            for part in range(plan.block // ROWS):
                half = values.at[pl.ds(part * ROWS, ROWS)]
                clear_rows_from(half, length - part * ROWS, ROWS, head_dim)
            plgpu.barrier_arrive(refs.cleared)

        @pl.when(worker == 1)
        def _wait() -> None:
            plgpu.barrier_wait(refs.cleared)
