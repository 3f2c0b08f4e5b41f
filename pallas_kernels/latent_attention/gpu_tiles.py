"""Latent attention on Hopper by tiles of 64 (token, head) rows: many heads, or many query tokens.

Four warpgroups pass the work on: one loads the blocks, one scores them, and two attend, each over
its half of the channels of the value. So the products of one block run under the softmax of the
next. The tiles' blocks are one line, cut evenly over the SMs, as in decode.
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

from pallas_kernels.latent_attention.gpu_combine import combine_tiles
from pallas_kernels.latent_attention.gpu_problem import LATENT, NEVER, PART, WIDTH, Problem
from pallas_kernels.latent_attention.gpu_runs import even_runs
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows
from pallas_kernels.ragged_attention.gpu_schedule import (
    BLOCK,
    BLOCKS,
    COUNT,
    ROW,
    SEEN,
    TOKEN,
    Queries,
    Segment,
    walk,
)
from pallas_kernels.ragged_attention.gpu_softmax import (
    LOG2E,
    MASKED,
    PER_ROW,
    ROWS,
    TILE,
    accumulate,
    clear_rows_from,
    row_vector,
    spread,
    swizzled,
)

_PARTS = WIDTH // PART
_HALF = LATENT // 2
# The two attending warpgroups' channels, as (part, first channel in it, channels).
# The part that both use comes last for both: what comes first is free for loading the earlier.
_PIECES = (((0, 0, 192), (1, 0, 64)), ((2, 0, 128), (1, 64, 128)))


@dataclass(frozen=True, slots=True)
class TilePlan:
    """workers: blocks of threads for each 64 heads of a token; slots: parts of blocks in flight."""

    workers: int
    slots: int = 2 * _PARTS


def tile_plan(heads: int, sms: int) -> TilePlan:
    """All SMs, side by side where a token's heads take more than one tile."""
    return TilePlan(workers=max(sms // -(-heads // ROWS), 1))


def tile_heads(heads: int) -> int:
    """Heads with padding: such that tokens fill a tile, or tiles a token."""
    if heads > ROWS:
        return -(-heads // ROWS) * ROWS
    return max(8, 1 << (heads - 1).bit_length())


def make_tiles(rows: RaggedRows, tokens: int, per_tile: int) -> tuple[Queries, Array]:
    """Tiles of at most per_tile query tokens of one row: their first token, row and tokens seen by
    the last; and their numbers of tokens.
    """
    lengths = rows.live_lengths()
    each = (lengths + per_tile - 1) // per_tile
    ends = jnp.cumsum(each)
    most = min(tokens, tokens // per_tile + rows.starts.shape[0])
    tile = jnp.arange(most, dtype=jnp.int32)
    row = (tile[:, None] >= ends).sum(axis=1, dtype=jnp.int32)
    live = tile < ends[-1]
    row = jnp.where(live, row, 0)
    offset = (tile - ends[row] + each[row]) * per_tile
    count = jnp.where(live, jnp.minimum(lengths[row] - offset, per_tile), 0)
    seen = (rows.kv_lengths - rows.query_lengths)[row] + offset + count
    token = jnp.where(live, rows.starts[row] + offset, 0)
    return Queries(token=token, row=row, seen=jnp.where(live, seen, 0)), count


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("problem", "plan"))
def attend_tiles(
    q: Float[Array, "tokens heads width"],
    pages: LatentPages,
    rows: RaggedRows,
    problem: Problem,
    plan: TilePlan,
) -> Float[Array, "tokens heads latent"]:
    """Causal attention of every row's query tokens over its pages; heads as tile_heads says."""
    tokens, heads, _ = q.shape
    per_tile, sides = max(ROWS // heads, 1), max(heads // ROWS, 1)
    queries, counts = make_tiles(rows, tokens, per_tile)
    schedules = even_runs(queries, plan.workers)
    out = jax.new_ref(lax.empty((tokens * heads, LATENT), q.dtype))
    parts = jax.new_ref(lax.empty((sides, 2 * plan.workers, ROWS, LATENT), q.dtype))
    weights = jax.new_ref(lax.empty((sides, 2 * plan.workers, ROWS), jnp.float32))
    named = {
        "q": q.reshape(tokens * heads, WIDTH),
        "latents": pages.latents,
        "table": rows.block_table,
        "items": schedules.items,
        "counts": counts,
        "work": schedules.work,
        "out": out,
        "parts": parts,
        "weights": weights,
    }

    _launch(problem, plan, named, sides)
    combine_tiles(problem, out, schedules, counts, parts, weights, rows.token_places(tokens).valid)
    return jax.freeze(out).reshape(tokens, heads, LATENT)


def _launch(problem: Problem, plan: TilePlan, named: dict[str, Any], sides: int) -> None:
    def latent_tiles(*refs: Any) -> None:
        given = dict(zip(named, refs, strict=False))
        scratch = ("lines", "shares", "fades", "ring")
        scratch += ("full", "free", "ready", "given", "taken", "stored")
        given.update(zip(scratch, refs[len(named) :], strict=True))
        given = SimpleNamespace(**given)
        worker, side = lax.axis_index("sm"), lax.axis_index("side")
        warpgroup = lax.axis_index("warpgroup")
        for index in range(2):
            attend = partial(_attend, problem, plan, given, worker, side, index)
            pl.when(warpgroup == index)(attend)
        pl.when(warpgroup == 2)(lambda: _score(problem, plan, given, worker, side))
        pl.when(warpgroup == 3)(lambda: _stream(problem, plan, given, worker))

    plgpu.kernel(
        latent_tiles,
        scratch_types=[
            plgpu.RefUnion(  # of one segment: first its queries, at last its outputs
                swizzled(ROWS, WIDTH, problem.dtype, (1,)),
                swizzled(ROWS, _HALF, problem.dtype, (2,)),
            ),
            swizzled(ROWS, BLOCK, problem.dtype),
            plgpu.SMEM((2, ROWS), jnp.float32),
            swizzled(BLOCK, PART, problem.dtype, (plan.slots,)),
            plgpu.Barrier(num_barriers=plan.slots),
            plgpu.Barrier(num_arrivals=3, num_barriers=plan.slots),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(plan.workers, sides),
        grid_names=("sm", "side"),
        num_threads=4,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=problem.interpret,
    )(*named.values())


def _slots(plan: TilePlan, segment: Segment, i: Any) -> list[Any]:
    """The slots of the parts of a segment's block i."""
    first = _PARTS * (segment.done + i)
    return [lax.rem(first + part, jnp.int32(plan.slots)) for part in range(_PARTS)]


def _stream(problem: Problem, plan: TilePlan, refs: Any, worker: Any) -> None:
    """The loading warpgroup: the parts of every block of the run, in order, as slots come free."""
    plgpu.set_max_registers(24, action="decrease")
    per_page = problem.page_size // BLOCK

    def load(segment: Segment) -> None:
        row = refs.items[segment.item, ROW]

        @pl.loop(0, segment.count)
        def _block(i: Any) -> None:
            block = segment.block + i
            page = refs.table[row, block // per_page]
            tokens = pl.ds(pl.multiple_of(block % per_page * BLOCK, BLOCK), BLOCK)
            for part, slot in enumerate(_slots(plan, segment, i)):

                @pl.when(_PARTS * (segment.done + i) + part >= plan.slots)
                def _reuse(slot: Any = slot) -> None:
                    plgpu.barrier_wait(refs.free.at[slot])

                plgpu.copy_gmem_to_smem(
                    refs.latents.at[page, tokens, pl.ds(part * PART, PART)],
                    refs.ring.at[slot],
                    refs.full.at[slot],
                )

    walk(refs.items, refs.work, worker, 1, load)
    uses = _PARTS * refs.work[worker, COUNT]

    @pl.loop(jnp.maximum(uses - plan.slots, 0), uses)  # every release must be seen before the end
    def _drain(use: Any) -> None:
        plgpu.barrier_wait(refs.free.at[lax.rem(use, jnp.int32(plan.slots))])


def _is_whole(refs: Any, segment: Segment) -> Any:
    """Whether a segment is all of its tile's blocks."""
    ends = segment.block + segment.count
    return (segment.block == 0) & (ends == refs.items[segment.item, BLOCKS])


def _flat_row(problem: Problem, token: Any, side: Any) -> Any:
    """Of q and out, the first row of a tile."""
    return pl.multiple_of(token * problem.heads + side * ROWS, 8)


def _score(problem: Problem, plan: TilePlan, refs: Any, worker: Any, side: Any) -> None:
    """The scoring warpgroup: gives the attending ones, block by block, the shares of its tokens
    and the factor by which older values fade; and at last what the sum is to be multiplied by.
    """
    plgpu.set_max_registers(104, action="decrease")
    queries = refs.lines[0]

    def compute(segment: Segment) -> None:
        item = segment.item
        pl.when(segment.done > 0)(lambda: plgpu.barrier_wait(refs.stored))
        rows = pl.ds(_flat_row(problem, refs.items[item, TOKEN], side), ROWS)
        plgpu.copy_gmem_to_smem(refs.q.at[rows], queries.at[0], refs.ready)
        plgpu.barrier_wait(refs.ready)
        to_first = refs.items[item, SEEN] - refs.counts[item] + 1  # tokens the tile's first sees

        block = partial(_score_block, problem, plan, refs, segment, to_first)
        clear = jnp.clip(to_first // BLOCK - segment.block, 0, segment.count)
        state = (row_vector(MASKED), row_vector(0.0))
        state = lax.fori_loop(0, clear, partial(block, False), state)
        top, total = lax.fori_loop(clear, segment.count, partial(block, True), state)
        _give(refs, jnp.bool_(False), 1.0 / total, None)

        @pl.when(~_is_whole(refs, segment))
        def _weight() -> None:
            refs.fades.at[1][...] = top + jnp.log(total) * LOG2E
            plgpu.commit_smem()
            index = 2 * worker + (segment.block == 0).astype(jnp.int32)
            plgpu.copy_smem_to_gmem(refs.fades.at[1], refs.weights.at[side, index])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    walk(refs.items, refs.work, worker, 1, compute)

    @pl.when(refs.work[worker, COUNT] > 0)
    def _last() -> None:
        plgpu.barrier_wait(refs.taken)
        plgpu.barrier_wait(refs.stored)


def _score_block(
    problem: Problem,
    plan: TilePlan,
    refs: Any,
    segment: Segment,
    to_first: Any,
    masked: bool,
    i: Any,
    state: tuple[Any, Any],
) -> tuple[Any, Any]:
    """Score a segment's block i and give its shares; state: each row's top and sum so far.

    to_first: tokens that the tile's first query token sees; each next one sees one more.
    """
    queries, factor = refs.lines[0], problem.scale * LOG2E
    top, total = state
    slots = _slots(plan, segment, i)

    def product(accumulator: Any) -> jax.Array:
        for part, slot in enumerate(slots):
            plgpu.barrier_wait(refs.full.at[slot])
            channels = queries.at[i >> NEVER, :, pl.ds(part * PART, PART)]
            plgpu.wgmma(accumulator, channels, refs.ring.at[slot].transpose((1, 0)))
        return accumulator[...]

    value = pl.run_scoped(product, plgpu.ACC((ROWS, BLOCK), jnp.float32))
    for slot in slots:
        plgpu.barrier_arrive(refs.free.at[slot])
    if masked:
        at = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=TILE)
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 0, layout=TILE)
        limit = to_first - (segment.block + i) * BLOCK
        # Scaled before it is masked: of a row that sees nothing here, the difference of
        # the masked value and the top must be 0, and no rounding of a huge product.
        value = jnp.where(at < row // min(problem.heads, ROWS) + limit, value * factor, MASKED)
    scale = 1.0 if masked else factor
    new = jnp.maximum(top, value.max(axis=1) * scale)
    fade = jnp.exp2(top - new)
    shares = jnp.exp2(value * scale - spread(new, BLOCK))
    _give(refs, (segment.done == 0) & (i == 0), fade, shares)
    return new, total * fade + shares.sum(axis=1)


def _give(refs: Any, first: Any, fade: jax.Array, shares: jax.Array | None) -> None:
    """Hand over to the attending warpgroups, once they have taken what was given before."""
    pl.when(~first)(lambda: plgpu.barrier_wait(refs.taken))
    refs.fades.at[0][...] = fade
    if shares is not None:
        refs.shares[...] = shares.astype(refs.shares.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.given)


def _attend(
    problem: Problem, plan: TilePlan, refs: Any, worker: Any, side: Any, which: int
) -> None:
    """An attending warpgroup: its half of the values' channels."""
    plgpu.set_max_registers(192, action="increase")
    pieces = _PIECES[which]
    (unused,) = set(range(_PARTS)) - {part for part, _, _ in pieces}

    def compute(segment: Segment) -> None:
        seen = refs.items[segment.item, SEEN]

        def block(i: Any, outs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slots = _slots(plan, segment, i)
            for part, _, _ in pieces:
                plgpu.barrier_wait(refs.full.at[slots[part]])
            plgpu.barrier_wait(refs.given)
            fade = plgpu.load(refs.fades.at[0], layout=PER_ROW)
            shares = plgpu.load(refs.shares, layout=TILE)
            plgpu.barrier_arrive(refs.taken)
            left = seen - (segment.block + i) * BLOCK
            values = [refs.ring.at[slots[part], :, pl.ds(at, n)] for part, at, n in pieces]

            @pl.when(left < BLOCK)
            def _clear() -> None:
                for each, (_, _, channels) in zip(values, pieces, strict=True):
                    for at in range(0, channels, BLOCK):
                        clear_rows_from(each.at[:, pl.ds(at, BLOCK)], left, BLOCK, BLOCK)

            outs = tuple(out * spread(fade, out.shape[1]) for out in outs)
            plgpu.barrier_arrive(refs.free.at[slots[unused]])
            found = []
            for out, each, (part, _, _) in zip(outs, values, pieces, strict=True):
                found.append(accumulate(out, shares, each, bool(problem.interpret)))
                plgpu.barrier_arrive(refs.free.at[slots[part]])
            return tuple(found)

        empty = tuple(
            plgpu.layout_cast(jnp.zeros((ROWS, n), jnp.float32), TILE) for _, _, n in pieces
        )
        outs = lax.fori_loop(0, segment.count, block, empty)
        plgpu.barrier_wait(refs.given)
        last = plgpu.load(refs.fades.at[0], layout=PER_ROW)
        plgpu.barrier_arrive(refs.taken)
        outs = tuple(out * spread(last, out.shape[1]) for out in outs)
        _store(problem, refs, worker, side, which, segment, outs)
        plgpu.barrier_arrive(refs.stored)

    walk(refs.items, refs.work, worker, 1, compute)


def _store(
    problem: Problem,
    refs: Any,
    worker: Any,
    side: Any,
    which: int,
    segment: Segment,
    outs: tuple[jax.Array, ...],
) -> None:
    """A warpgroup's channels of a whole tile's outputs, or of a part of them."""
    mine = refs.lines[1].at[which]
    for out, (part, at, channels) in zip(outs, _PIECES[which], strict=True):
        piece = mine.at[:, pl.ds(part * PART + at - which * _HALF, channels)]
        piece[...] = out.astype(problem.dtype)
    plgpu.commit_smem()
    per_token = min(problem.heads, ROWS)
    channels = pl.ds(which * _HALF, _HALF)
    whole = _is_whole(refs, segment)

    @pl.when(whole)
    def _rows() -> None:
        first = _flat_row(problem, refs.items[segment.item, TOKEN], side)

        @pl.loop(0, refs.counts[segment.item])
        def _token(token: Any) -> None:
            ahead = pl.multiple_of(token * per_token, 8)
            plgpu.copy_smem_to_gmem(
                mine.at[pl.ds(ahead, per_token)],
                refs.out.at[pl.ds(first + ahead, per_token), channels],
            )

    @pl.when(~whole)
    def _part() -> None:
        index = 2 * worker + (segment.block == 0).astype(jnp.int32)
        plgpu.copy_smem_to_gmem(mine, refs.parts.at[side, index, :, channels])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
