"""Tokens sorted by experts on Hopper in one kernel: the work list, and each tile's rows in place.

A block of threads ranks a few tokens among those that chose the same expert: a product with a
triangle counts them. All blocks tell each other how many they have, which says where each expert's
tiles begin; then each copies its tokens' rows there, read once for all of a token's experts.
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

from pallas_kernels.expert_mlp.gpu_tiles import Tiles

ROWS = 64  # of the matrix unit
CHOICES = 8  # columns of the list of choices
_BLOCKS = 128  # at most
_MOST = 256  # experts
_RING = 96 * 1024  # bytes of shared memory for rows on their way
_TILE = plgpu.Layout.WGMMA
_ROW, _COLUMN = _TILE.reduce(1), _TILE.reduce(0)


@dataclass(frozen=True, slots=True)
class _Sort:
    """The static facts. each: tokens of a block of threads; columns: places of a tile."""

    tokens: int
    choices: int
    each: int
    experts: int
    columns: int
    model: int
    dtype: Any
    interpret: Any

    @property
    def blocks(self) -> int:
        """Blocks of threads."""
        return self.tokens // self.each

    @property
    def wide(self) -> int:
        """Experts, with as many as nobody chooses as fill a tile of the matrix unit."""
        return -(-self.experts // ROWS) * ROWS

    @property
    def tiles(self) -> int:
        """Tiles at most."""
        assigned = self.tokens * self.choices
        return assigned // self.columns + min(self.experts, assigned)

    @property
    def line(self) -> int:
        """Elements of a row that are side by side for the copy engine."""
        return next(each for each in (256, 128, 64) if self.model % each == 0)

    @property
    def slots(self) -> int:
        """Rows on their way."""
        return max(2, min(self.each, 32, _RING // (2 * self.model)))


def sorts(tokens: int, experts: int, choices: int, sms: int) -> bool:
    """Whether the kernel serves so many. sms: blocks of threads that run at the same time."""
    each = _each(tokens, sms)
    fits = tokens >= ROWS and tokens % each == 0 and each <= ROWS
    return fits and experts <= _MOST and choices <= CHOICES


def _each(tokens: int, sms: int) -> int:
    """Tokens of a block of threads: a power of two."""
    return 1 << (max(-(-tokens // min(_BLOCKS, sms)), 1) - 1).bit_length()


@partial(jax.jit, static_argnames=("num_experts", "columns", "sms", "interpret"))
def sort_rows(
    x: Float[Array, "tokens model"],
    experts: Int[Array, "tokens choices"],
    *,
    num_experts: int,
    columns: int,
    sms: int,
    interpret: Any = None,
) -> tuple[Float[Array, "places model"], Tiles]:
    """x's rows tile after tile, and the tiles, of `columns` places each, as tiles_of_sorted_tokens.

    A place that no token has holds anything.
    """
    tokens, model = x.shape
    given = experts.shape[1]
    each = _each(tokens, sms)
    sort = _Sort(tokens, given, each, num_experts, columns, model, x.dtype, interpret)
    if given < CHOICES:
        experts = jnp.pad(experts, ((0, 0), (0, CHOICES - given)), constant_values=-1)
    folded = (model // sort.line, sort.line)
    shapes = {
        "counts": ((-(-sort.blocks // ROWS) * ROWS, sort.wide), jnp.float32),
        "rows": ((sort.tiles * columns, *folded), x.dtype),
        "tile": ((-(-sort.tiles // ROWS) * ROWS,), jnp.int32),
        "ends": ((sort.wide,), jnp.int32),
        "place": ((tokens, CHOICES), jnp.int32),
    }
    named: dict[str, Any] = {"x": x.reshape(tokens, *folded), "experts": experts}
    made = {name: jax.new_ref(lax.empty(*shape)) for name, shape in shapes.items()}
    if interpret is None:
        _launch(sort, (True, True), {**named, **made})
    else:  # the interpreter has no counters in memory
        _launch(sort, (True, False), {**named, **made})
        _launch(sort, (False, True), {**named, **made})
    found = SimpleNamespace(**{name: jax.freeze(ref) for name, ref in made.items()})
    place = found.place[:, :given]
    tiles = Tiles(
        expert=found.tile[: sort.tiles],
        ends=found.ends,
        place=jnp.maximum(place, 0),
        mine=place >= 0,
        token=jnp.zeros((0,), jnp.int32),
    )
    return found.rows.reshape(-1, model), tiles


def _launch(sort: _Sort, parts: tuple[bool, bool], named: dict[str, Any]) -> None:
    """parts: whether tokens are counted, and whether they are placed."""
    swizzle = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch = {
        "triangle": plgpu.SMEM((ROWS, ROWS), jnp.bfloat16, transforms=swizzle),
        "members": plgpu.SMEM((sort.wide // ROWS, ROWS, ROWS), jnp.bfloat16, transforms=swizzle),
        "line": plgpu.SMEM((sort.wide,), jnp.float32),
        "numbers": plgpu.SMEM((sort.wide,), jnp.int32),
        "all_counts": plgpu.SMEM((ROWS, sort.wide), jnp.float32),
        "places": plgpu.SMEM((ROWS, CHOICES), jnp.int32),
        "ring": plgpu.SMEM((sort.slots, sort.model // sort.line, sort.line), sort.dtype),
        "here": plgpu.Barrier(num_barriers=sort.slots),
        "counted": plgpu.Barrier(),
    }

    def experts_sort(*refs: Any) -> None:
        here = SimpleNamespace(**dict(zip((*named, *scratch), refs, strict=True)))
        _sort(sort, parts, here)

    plgpu.kernel(
        experts_sort,
        scratch_types=list(scratch.values()),
        grid=(sort.blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=sort.interpret,
        kernel_name="experts_sort",
    )(*named.values())


def _sort(sort: _Sort, parts: tuple[bool, bool], refs: Any) -> None:
    counts, places = parts
    block = lax.axis_index("block")
    start = jnp.minimum(block * sort.each, sort.tokens - ROWS)  # of the rows that it looks at
    low = block * sort.each - start
    if places:
        for row in range(min(sort.slots, sort.each)):
            _fetch(sort, refs, block * sort.each + row, jnp.int32(row))
    chosen = _chosen(refs, start, _own(sort, low))
    _mark(sort, refs, chosen)
    if counts:
        plgpu.copy_smem_to_gmem(refs.line, refs.counts.at[block])
        plgpu.wait_smem_to_gmem(0)
    if counts and places:
        told = pl.get_global(plgpu.SemaphoreType.REGULAR)
        plgpu.semaphore_signal(told, 1, memory_scope="gpu")
        plgpu.semaphore_wait(told, sort.blocks, decrement=False, memory_scope="gpu")
    if places:
        bases = _begin(sort, refs, block)
        _place(sort, refs, chosen, bases, low)
        _copy(sort, refs, block * sort.each, low)


def _iota(dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, ROWS), dimension, layout=_TILE)


def _spread(vector: jax.Array, dimension: int) -> jax.Array:
    return lax.broadcast_in_dim(vector, (ROWS, ROWS), [dimension])


def _own(sort: _Sort, low: Any) -> jax.Array:
    """[ROWS, CHOICES]: which of the rows that this block looks at are its tokens'."""
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, CHOICES), 0, layout=_TILE)
    return (row >= low) & (row < low + sort.each)


def _chosen(refs: Any, start: Any, own: jax.Array) -> list[jax.Array]:
    """[ROWS] of each choice: the experts; less than none of rows that are not this block's."""
    source = refs.experts.at[pl.ds(start, ROWS)]
    listed = plgpu.load(source, layout=_TILE, optimized=False)
    listed = jnp.where(own, listed, jnp.full_like(listed, -1))
    column = plgpu.broadcasted_iota(jnp.int32, listed.shape, 1, layout=_TILE)
    nothing = jnp.zeros_like(listed)
    return [jnp.where(column == k, listed, nothing).sum(axis=1) for k in range(CHOICES)]


def _mark(sort: _Sort, refs: Any, chosen: list[jax.Array]) -> None:
    """Who has chosen whom, and how many each has, to shared memory; and the triangle."""
    row, column = _iota(0), _iota(1)
    one, nothing = jnp.ones_like(row).astype(jnp.float32), jnp.zeros_like(row).astype(jnp.float32)
    refs.triangle[...] = jnp.where(column < row, one, nothing).astype(jnp.bfloat16)
    for some in range(sort.wide // ROWS):
        here = column + some * ROWS
        taken = here < 0
        for each in chosen:
            taken = taken | (here == _spread(each, 0))
        members = jnp.where(taken & (here < sort.experts), one, nothing)
        refs.members.at[some][...] = members.astype(jnp.bfloat16)
        refs.line.at[pl.ds(some * ROWS, ROWS)][...] = members.sum(axis=0)
    plgpu.commit_smem()


def _begin(sort: _Sort, refs: Any, block: Any) -> list[jax.Array]:
    """[ROWS] of each 64 experts: where this block's first token of each belongs; lists the tiles.

    In float32, which holds them exactly.
    """
    row, column = _iota(0), _iota(1)
    parts = range(sort.wide // ROWS)
    before, sizes = [None for _ in parts], [None for _ in parts]
    for first in range(0, sort.blocks, ROWS):
        plgpu.copy_gmem_to_smem(refs.counts.at[pl.ds(first, ROWS)], refs.all_counts, refs.counted)
        plgpu.barrier_wait(refs.counted)
        for some in parts:
            source = refs.all_counts.at[:, pl.ds(some * ROWS, ROWS)]
            count = plgpu.load(source, layout=_TILE, optimized=False)
            nothing = jnp.zeros_like(count)
            for sums, limit in ((before, block), (sizes, jnp.int32(sort.blocks))):
                part = jnp.where(row + first < limit, count, nothing).sum(axis=0)
                sums[some] = part if sums[some] is None else sums[some] + part
        plgpu.commit_smem()  # all have read it
    shift = sort.columns.bit_length() - 1
    tiles = []
    for some, size in enumerate(sizes):
        whole = size.astype(jnp.int32) + (sort.columns - 1)
        each = lax.shift_right_logical(whole, jnp.full_like(whole, shift)).astype(jnp.float32)
        refs.line.at[pl.ds(some * ROWS, ROWS)][...] = each
        tiles.append(each)
    plgpu.commit_smem()
    ends = []
    for some in parts:
        end = None
        for other in range(some + 1):
            source = refs.line.at[pl.ds(other * ROWS, ROWS)]
            each = _spread(plgpu.load(source, layout=_ROW, optimized=False), 0)
            earlier = row + other * ROWS <= column + some * ROWS
            part = jnp.where(earlier, each, jnp.zeros_like(each)).sum(axis=0)
            end = part if end is None else end + part
        ends.append(end)
    _list(sort, refs, ends, block)
    return [
        (end - each) * float(sort.columns) + ahead
        for end, each, ahead in zip(ends, tiles, before, strict=True)
    ]


def _list(sort: _Sort, refs: Any, ends: list[jax.Array], block: Any) -> None:
    """The experts of tiles, by as many blocks as there are 64 tiles; their ends."""

    @pl.loop(0, lax.div(refs.tile.shape[0] // ROWS - block + sort.blocks - 1, sort.blocks))
    def _some(turn: Any) -> None:
        first = (block + turn * sort.blocks) * ROWS
        row, column = _iota(0), _iota(1)
        one = jnp.ones_like(row).astype(jnp.float32)
        number = None
        for some, end in enumerate(ends):
            over = row + first >= _spread(end.astype(jnp.int32), 1)
            over = over & (column + some * ROWS < sort.experts - 1)
            part = jnp.where(over, one, jnp.zeros_like(one)).sum(axis=1)
            number = part if number is None else number + part
        refs.numbers.at[pl.ds(0, ROWS)][...] = number.astype(jnp.int32)
        plgpu.commit_smem()
        target = refs.tile.at[pl.ds(pl.multiple_of(first, ROWS), ROWS)]
        plgpu.copy_smem_to_gmem(refs.numbers.at[pl.ds(0, ROWS)], target)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(block == 0)
    def _ends() -> None:
        for some, end in enumerate(ends):
            refs.numbers.at[pl.ds(some * ROWS, ROWS)][...] = end.astype(jnp.int32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.numbers, refs.ends)
        plgpu.wait_smem_to_gmem(0)


def _ranks(refs: Any, some: int) -> jax.Array:
    """float32 [ROWS, ROWS]: how many of the rows before have chosen each of 64 experts."""

    def product(total: Any) -> jax.Array:
        plgpu.wgmma(total, refs.triangle, refs.members.at[some])
        plgpu.wgmma_wait(0)
        return total[...]

    return pl.run_scoped(product, plgpu.ACC((ROWS, ROWS), jnp.float32))


def _place(
    sort: _Sort, refs: Any, chosen: list[jax.Array], bases: list[jax.Array], low: Any
) -> None:
    """Where each choice's row belongs, to both memories; less than nowhere if nowhere."""
    places: list[Any] = [None for _ in chosen]
    for some, base in enumerate(bases):
        column = _iota(1) + some * ROWS
        where = _ranks(refs, some) + _spread(base, 1)
        for k, each in enumerate(chosen):
            mine = jnp.where(column == _spread(each, 0), where, jnp.zeros_like(where)).sum(axis=1)
            places[k] = mine if places[k] is None else places[k] + mine
    narrow = plgpu.broadcasted_iota(jnp.int32, (ROWS, CHOICES), 1, layout=_TILE)
    found = plgpu.layout_cast(jnp.full((ROWS, CHOICES), -1.0, jnp.float32), _TILE)
    for k, (each, place) in enumerate(zip(chosen, places, strict=True)):
        real = (each >= 0) & (each < sort.experts)
        place = jnp.where(real, place, jnp.full_like(place, -1.0))
        found = jnp.where(narrow == k, lax.broadcast_in_dim(place, narrow.shape, [0]), found)
    refs.places[...] = found.astype(jnp.int32)
    plgpu.commit_smem()
    block = lax.axis_index("block")
    own = refs.places.at[pl.ds(low, sort.each)]
    plgpu.copy_smem_to_gmem(own, refs.place.at[pl.ds(block * sort.each, sort.each)])


def _fetch(sort: _Sort, refs: Any, token: Any, slot: Any) -> None:
    plgpu.copy_gmem_to_smem(refs.x.at[token], refs.ring.at[slot], refs.here.at[slot])


def _copy(sort: _Sort, refs: Any, first: Any, low: Any) -> None:
    """This block's tokens' rows to all their places."""
    slots = jnp.int32(sort.slots)
    behind = max(sort.slots // 2, 1)  # rows whose copies may still be under way

    @pl.loop(0, sort.each)
    def _token(row: Any) -> None:
        slot = lax.rem(row, slots)
        plgpu.barrier_wait(refs.here.at[slot])
        for k in range(CHOICES):
            place = refs.places[low + row, k]
            target = refs.rows.at[jnp.maximum(place, 0)]

            @pl.when(place >= 0)
            def _put(target: Any = target) -> None:
                plgpu.copy_smem_to_gmem(refs.ring.at[slot], target, commit_group=False)

        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(behind, wait_read_only=True)
        again = row - behind + slots  # the row before these has left its slot
        pl.when((row >= behind) & (again < sort.each))(
            lambda: _fetch(sort, refs, first + again, lax.rem(again, slots))
        )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
