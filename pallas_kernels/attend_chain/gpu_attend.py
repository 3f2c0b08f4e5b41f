"""A chain's first stage where one token attends: its heads turn, are written and attend.

A block of threads takes one KV head, or a piece of what it sees; those that have none go on to
their weights, which stream meanwhile: so attention costs no launch and leaves no memory idle.
Pieces are joined by the block that has the first, after a barrier.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attend_chain.gpu_places import BLOCK, IN_FLIGHT, Place
from pallas_kernels.layer_chain.gpu_barrier import meet
from pallas_kernels.layer_chain.gpu_plan import Plan, Problem
from pallas_kernels.ragged_attention.gpu_softmax import (
    LOG2E,
    MASKED,
    PER_ROW,
    ROWS,
    TILE,
    Softmax,
    accumulate,
    accumulate_all,
    across,
    advance,
    clear_rows_from,
    row_vector,
    scores,
    spread,
    to_log2,
)
from pallas_kernels.rope_write.gpu_turn import Turn, prepared, turned

HEAD = 128  # channels of a head: a tile of the ring holds as many
LINE = ROWS * HEAD * 2  # bytes of shared memory beside the ring's


@dataclass(frozen=True, slots=True)
class Attending:
    """What is fixed of the attention. pieces: the most of the context. first, after: the pieces
    that a launch attends, all but in the interpreter, which has no barrier of the whole grid.
    opens_early: the weights of blocks that join nothing come while pieces are joined.
    """

    kv_heads: int
    group: int
    page_size: int
    num_pages: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: bool
    turn: Turn
    pieces: int
    first: int = 0
    after: int | None = None
    opens_early: bool = False

    @property
    def slots(self) -> int:
        """Of the weights' ring: tiles of queries, keys and values, two of which make a slot."""
        return (1 + 2 * IN_FLIGHT + 1) // 2

    @property
    def part_rows(self) -> int:
        """Rows of a piece's result in scratch memory."""
        return -(-self.group // 8) * 8

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory beside the ring's, and barriers."""
        return {
            "line": plgpu.SMEM((ROWS, HEAD), dtype),
            "fresh": plgpu.Barrier(),
            "fetched": plgpu.Barrier(num_barriers=2 * IN_FLIGHT),
            "opened": plgpu.Barrier(),
            "joined": plgpu.Barrier(num_arrivals=3),
        }

    def run(self, problem: Problem, plan: Plan, refs: Any) -> None:
        """This block's share: its unit, and its part in what the whole grid does.

        Heads begin where a product of fewer units than blocks leaves a block without one.
        """
        block, blocks = lax.axis_index("block"), jnp.int32(plan.blocks)
        head = lax.div((block + 1) * self.kv_heads - 1, blocks)
        piece = block - lax.div(head * blocks, jnp.int32(self.kv_heads)) + self.first
        is_busy = piece < (self.pieces if self.after is None else self.after)
        pl.when(is_busy)(lambda: _unit(problem, plan, refs, self, head, piece))

        @pl.when(~is_busy)
        def _idle() -> None:
            plgpu.barrier_arrive(refs.opened)
            if not problem.interpret:
                _meet_if_cut(refs.places[0, Place._fields.index("pieces")], plan, refs)

    def hand_on(self, refs: Any, head: Any) -> None:
        """Begin to write a KV head's outputs, from the line, for all blocks to read."""
        width = refs.attended.shape[1]
        for index in range(self.group):
            column = (head * self.group + index) * HEAD
            row = lax.div(column, jnp.int32(width))
            at = pl.ds(pl.multiple_of(lax.rem(column, jnp.int32(width)), HEAD), HEAD)
            target = refs.attended.at[pl.ds(row, 1), at]
            plgpu.copy_smem_to_gmem(refs.line.at[pl.ds(index, 1)], target)


def _meet_if_cut(pieces: Any, plan: Plan, refs: Any) -> None:
    """All blocks of threads, where there is more than one piece: the parts have been written."""

    @pl.when(pieces > 1)
    def _meet() -> None:
        plgpu.wait_smem_to_gmem(0)
        meet(refs.state, plan.blocks)


class _Unit(NamedTuple):
    """One KV head, and a piece of what its token sees."""

    head: Any
    piece: Any
    place: Place

    @classmethod
    def of(cls, one: Attending, refs: Any, head: Any, piece: Any) -> "_Unit":
        """This one, whose raw heads are on their way."""
        line = refs.line.at[pl.ds(0, one.group + 2)]
        plgpu.copy_gmem_to_smem(refs.raw.at[0, head], line, refs.fresh)
        place = Place(*(refs.places[piece, each] for each in range(len(Place._fields))))
        # All are asked for at once: behind branches they would be waited for one by one.
        together = functools.reduce(operator.or_, place)
        return cls(head, piece, place._replace(last=jnp.where(together >= 0, place.last, 0)))

    @property
    def leads(self) -> Any:
        """Whether this is the first piece, to which the token itself belongs."""
        return self.piece == 0


def _unit(problem: Problem, plan: Plan, refs: Any, one: Attending, head: Any, piece: Any) -> None:
    """A unit from its raw heads to its outputs: what is new is in registers, what is old in pages.

    The new key and value are written behind all reading of the pages.
    """
    unit = _Unit.of(one, refs, head, piece)
    place, blocks = unit.place, _Blocks(refs, one, unit)
    blocks.begin()
    heads = _turn(refs, one)
    state = lax.fori_loop(
        *(place.first, place.last),
        lambda i, state: _block(problem, blocks, i, state),
        _own(refs, one, unit, heads),
    )
    if one.pieces > 1:
        part = head * one.pieces + piece
        is_part = ~unit.leads & (piece < place.pieces)
        pl.when(is_part)(lambda: _store_part(problem, refs, one, part, state))
        if one.opens_early:
            pl.when(~unit.leads)(lambda: _open(refs))
        if not problem.interpret:
            _meet_if_cut(place.pieces, plan, refs)
        rows = jnp.where(unit.leads, (place.pieces - 1) * one.part_rows, 0)
        state = _join(problem, refs, one, (part + 1) * one.part_rows, rows, state)
    pl.when(unit.leads)(lambda: _store(problem, refs, one, unit, state, heads))
    is_own = (place.page < one.num_pages) & unit.leads
    pl.when(is_own)(lambda: _write(refs, one, unit))
    if one.pieces > 1 and one.opens_early:
        pl.when(unit.leads)(lambda: _open(refs))
    else:
        _open(refs)


def _open(refs: Any) -> None:
    """Leave the ring to the weights."""
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(refs.opened)


def _turn(refs: Any, one: Attending) -> jax.Array:
    """The unit's heads, turned: queries, key, value, in registers, in the line, in a tile."""
    found = prepared(one.turn, refs, 0, HEAD)
    plgpu.barrier_wait(refs.fresh)
    raw = plgpu.load(refs.line, layout=TILE, optimized=False)
    heads = turned(one.turn, raw, found, one.group, 1)
    _to_line(refs, heads)
    plgpu.commit_smem()
    return heads


def _to_line(refs: Any, value: jax.Array) -> None:
    """Rows to the line, from where they are copied, through the queries' tile: its swizzle spares
    the bank conflicts of writing plain rows.
    """
    tile = refs.ring.at[0]
    tile[...] = value
    layout = plgpu.Layout.SMEM_GMEM_COPY((ROWS, HEAD), value.dtype, 128)
    refs.line[...] = plgpu.load(tile, layout=layout, optimized=False)


def _write(refs: Any, one: Attending, unit: _Unit) -> None:
    """Begin to write the new key and value, from the line to their page."""
    for place, pages in ((one.group, refs.keys), (one.group + 1, refs.values)):
        target = pages.at[unit.place.page, pl.ds(unit.head, 1), unit.place.offset]
        plgpu.copy_smem_to_gmem(refs.line.at[pl.ds(place, 1)], target)


def _own(refs: Any, one: Attending, unit: _Unit, heads: jax.Array) -> Softmax:
    """The softmax that has seen the token itself, as that of the first piece; else nothing."""
    key, value = (across(refs.line.at[one.group + side], HEAD) for side in range(2))
    score = (heads.astype(jnp.float32) * key).sum(axis=1)
    score, factor = to_log2(score, one.scale, one.soft_cap, None)
    keep = jnp.where(unit.leads, 1.0, 0.0)
    top = jnp.where(unit.leads, score * factor, MASKED)
    return Softmax(value * keep, top, row_vector(1.0) * keep)


def _store_part(problem: Problem, refs: Any, one: Attending, number: Any, state: Softmax) -> None:
    """Begin to write a piece's result, as two numbers of the narrow type, and its weight."""
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, HEAD), 0, layout=TILE)
    value = state.out / spread(state.total, HEAD)
    value = jnp.where(row < one.group, value, jnp.zeros_like(value))
    high = value.astype(problem.dtype)
    refs.ring.at[1][...] = high
    refs.ring.at[2][...] = (value - high.astype(jnp.float32)).astype(problem.dtype)
    logs = refs.sums.at[pl.ds(0, ROWS)]
    logs[...] = state.top + jnp.log(state.total) * LOG2E
    plgpu.commit_smem()
    held = pl.ds(0, one.part_rows)
    place = pl.ds(pl.multiple_of(number * one.part_rows, 8), one.part_rows)
    for side in range(2):
        plgpu.copy_smem_to_gmem(refs.ring.at[1 + side, held], refs.parts.at[side, place])
    plgpu.copy_smem_to_gmem(logs.at[held], refs.weights.at[place])


def _join(
    problem: Problem, refs: Any, one: Attending, first: Any, rows: Any, state: Softmax
) -> Softmax:
    """The softmax that goes on over so many rows of parts."""

    def some(index: Any, state: Softmax) -> Softmax:
        place = pl.ds(pl.multiple_of(first + index * ROWS, 8), ROWS)
        tiles = [refs.ring.at[1 + side] for side in range(2)]
        for side, tile in enumerate(tiles):
            plgpu.copy_gmem_to_smem(refs.parts.at[side, place], tile, refs.joined)
        logs = refs.sums.at[pl.ds(0, ROWS)]
        plgpu.copy_gmem_to_smem(refs.weights.at[place], logs, refs.joined)
        plgpu.barrier_wait(refs.joined)
        for tile in tiles:
            clear_rows_from(tile, rows - index * ROWS, ROWS, HEAD)
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS, ROWS), 0, layout=TILE)
        part = plgpu.broadcasted_iota(jnp.int32, (ROWS, ROWS), 1, layout=TILE) + index * ROWS
        own = (lax.rem(part, jnp.int32(one.part_rows)) == row) & (part < rows)
        shares, state = advance(state, jnp.where(own, across(logs, ROWS), MASKED), 1.0)
        high = shares.astype(problem.dtype)
        low = (shares - high.astype(jnp.float32)).astype(problem.dtype)
        pairs = ((high, tiles[0]), (low, tiles[0]), (high, tiles[1]))
        out = accumulate_all(state.out, pairs, bool(problem.interpret))
        plgpu.commit_smem()
        return state._replace(out=out)

    return lax.fori_loop(0, (rows + ROWS - 1) // ROWS, some, state)


class _Blocks(NamedTuple):
    """A unit's blocks on their way: two at a time, in tiles of the ring."""

    refs: Any
    one: Attending
    unit: _Unit

    def _turn(self, block: Any) -> Any:
        return lax.rem(block - self.unit.place.first, jnp.int32(IN_FLIGHT))

    def tile(self, block: Any, side: int) -> Any:
        """Keys (0) or values (1)."""
        return self.refs.ring.at[1 + 2 * self._turn(block) + side]

    def ready(self, block: Any, side: int) -> Any:
        """The barrier of their arrival."""
        return self.refs.fetched.at[2 * self._turn(block) + side]

    def begin(self) -> None:
        """Ask for the first ones."""
        place = self.unit.place
        for ahead, page in enumerate((place.near, place.next)):
            block = place.first + ahead
            pl.when(block < place.last)(lambda block=block, page=page: self.fetch(block, page))

    def fetch(self, block: Any, page: Any = None) -> None:
        """Ask for one, whose page may be known."""
        per_page = jnp.int32(self.one.page_size // BLOCK)
        if page is None:
            page = self.refs.table[0, lax.div(block, per_page)]
        at = pl.ds(pl.multiple_of(lax.rem(block, per_page) * BLOCK, BLOCK), BLOCK)
        for side, pages in enumerate((self.refs.keys, self.refs.values)):
            plgpu.copy_gmem_to_smem(
                pages.at[page, self.unit.head, at], self.tile(block, side), self.ready(block, side)
            )


def _block(problem: Problem, blocks: _Blocks, i: Any, state: Softmax) -> Softmax:
    """One block of keys and values, of which only those before the token's own are seen."""
    one, refs = blocks.one, blocks.refs
    plgpu.barrier_wait(blocks.ready(i, 0))
    raw = scores(refs.ring.at[0], blocks.tile(i, 0), BLOCK)
    key = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=TILE)
    left = blocks.unit.place.position - i * BLOCK
    value, factor = to_log2(raw, one.scale, one.soft_cap, None)
    visible = key < left
    if one.window is not None:
        visible &= key >= left + 1 - one.window
    weights, state = advance(state, jnp.where(visible, value, MASKED), factor)
    plgpu.barrier_wait(blocks.ready(i, 1))
    values = blocks.tile(i, 1)
    clear_rows_from(values, left, BLOCK, HEAD)
    weights = weights.astype(problem.dtype)
    out = accumulate(state.out, weights, values, bool(problem.interpret))
    plgpu.commit_smem()  # all warps are done with both tiles
    pl.when(i + IN_FLIGHT < blocks.unit.place.last)(lambda: blocks.fetch(i + IN_FLIGHT))
    return state._replace(out=out)


def _store(
    problem: Problem, refs: Any, one: Attending, unit: _Unit, state: Softmax, heads: jax.Array
) -> None:
    """Hand on the finished heads; zeros for padding. The new key and value stay in the line."""
    top, total = state.top, state.total
    fade = row_vector(1.0)
    if one.sinks:
        sink = plgpu.load(refs.sinks.at[unit.head], layout=PER_ROW, optimized=False) * LOG2E
        top = jnp.maximum(state.top, sink)
        fade = jnp.exp2(state.top - top)
        total = total * fade + jnp.exp2(sink - top)
    out = state.out * spread(fade / total, HEAD)
    out = jnp.where(unit.place.valid != 0, out, jnp.zeros_like(out))
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, HEAD), 0, layout=TILE)
    _to_line(refs, jnp.where(row < one.group, out.astype(problem.dtype), heads))
    plgpu.commit_smem()
    one.hand_on(refs, unit.head)
