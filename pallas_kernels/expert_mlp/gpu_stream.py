"""Products of a few rows with many experts on Hopper: weights stream once through shared memory.

Operands are swapped: 64 rows of a weight are the matrix unit's left side and a tile's few rows of
activations its right, so that a tile of 8 rows costs 8 columns and not 64 rows. One warpgroup
streams, the other multiplies. Both products of an expert, gate/up and down, are of this shape, and
are one kernel: a tile's second product begins when counters say that all of its first is there, and
its weights are on their way by then.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.expert_mlp.checks import Gate
from pallas_kernels.expert_mlp.gpu_tiles import Tiles
from pallas_kernels.expert_mlp.shared import SharedExpert

BLOCK = 64  # rows of a weight that one product of the matrix unit takes
_HALVES = 2  # such blocks that a step takes: of the gate and of up, or of down twice
TILE = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """sms: blocks of threads; columns: activation rows of a tile, a multiple of 8.

    depth: elements of a weight row that a step takes; slots: steps in flight. together: both
    products in one kernel, which needs all blocks of threads to run at the same time.
    """

    sms: int
    columns: int
    depth: int
    slots: int
    together: bool = True


def slots(columns: int, depth: int, shared_memory: int) -> int:
    """Steps in flight that shared memory holds."""
    room = shared_memory - 2048 - _HALVES * BLOCK * columns * 2
    return min(room // ((_HALVES * BLOCK + columns) * depth * 2), 16)


@dataclass(frozen=True, slots=True)
class _Product:
    """The static facts of one product: gate None means a plain one (down).

    listed: as of few_rows; then `tiles` is the number of tiles, else it is read from memory.
    """

    shared: bool
    listed: int | None
    tiles: int
    dtype: Any
    gate: Gate | None
    bias: bool
    gathered: bool
    waits: bool
    inputs: int
    outputs: int

    @property
    def halves(self) -> int:
        """Blocks of weight rows of a step."""
        return _HALVES if self.gate is not None or self.outputs % (2 * BLOCK) == 0 else 1

    @property
    def width(self) -> int:
        """Columns of the output that one item of work makes."""
        return BLOCK if self.gate is not None else BLOCK * self.halves

    @property
    def blocks(self) -> int:
        """Items of work of a tile."""
        return self.outputs // self.width


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("gate", "plan", "listed", "interpret"))
def few_rows(
    rows: Float[Array, "rows model"],
    gate_up: Float[Array, "experts 2 ffn model"],
    down: Float[Array, "experts model ffn"],
    tiles: Tiles,
    *,
    gate: Gate,
    plan: StreamPlan,
    bias: Float[Array, "experts 2 ffn"] | None = None,
    shared: SharedExpert | None = None,
    listed: int | None = None,
    interpret: Any = None,
) -> Float[Array, "places model"]:
    """down @ gate(gate @ row, up @ row) of each tile's rows with its expert.

    Tile i writes plan.columns places from i * plan.columns on, and reads the rows there, or all
    tokens. Experts past the last one are the parts of the shared expert, each as wide as an expert.
    listed: only so many tiles have their experts in the list, where a number that is none is as
    good as any; the rest are the shared expert's parts. None: the list holds all tiles.
    """
    _, model, ffn = down.shape
    most = tiles.expert.shape[0]
    if listed is not None:
        most = listed + (0 if shared is None else shared.down.shape[1] // ffn)
    facts = (shared is not None, listed, most, rows.dtype)
    # Where the last product's steps are of another shape, the kernels cannot share the ring.
    together = plan.together and model % (2 * BLOCK) == 0
    first = _Product(
        *facts,
        gate=gate,
        bias=bias is not None,
        gathered=tiles.token is not None,
        waits=False,
        inputs=model,
        outputs=ffn,
    )
    second = replace(
        first, gate=None, bias=False, gathered=True, waits=together, inputs=ffn, outputs=model
    )
    places = most * plan.columns
    hidden = {"hidden": jax.ShapeDtypeStruct((places, ffn), rows.dtype)}
    out = {"out": jax.ShapeDtypeStruct((places, model), rows.dtype)}
    up = {"rows": rows, "gate_up": gate_up}
    if bias is not None:
        up["bias"] = bias.astype(jnp.float32)
    if shared is not None:
        up["shared_up"] = shared.gate_up
    back = {"down": down} | ({} if shared is None else {"shared_down": shared.down})
    call = partial(_call, plan, tiles, interpret)
    if together:
        return call((first, second), up | back, hidden | out)["out"]
    return call((second,), call((first,), up, hidden) | back, out)["out"]


def _call(
    plan: StreamPlan,
    tiles: Tiles,
    interpret: Any,
    products: tuple[_Product, ...],
    given: dict[str, Any],
    made: dict[str, Any],
) -> dict[str, jax.Array]:
    """One kernel that makes `made` of `given`."""
    given = given | {"experts": tiles.expert, "ends": tiles.ends}
    halves, dtype = products[0].halves, products[0].dtype
    scratch = {
        "weights": _swizzled((plan.slots, halves, BLOCK, plan.depth), dtype),
        "columns": _swizzled((plan.slots, plan.columns, plan.depth), dtype),
        "results": plgpu.SMEM((halves, plan.columns, BLOCK), dtype),
        "full": plgpu.Barrier(num_arrivals=halves + 1, num_barriers=plan.slots),
        "free": plgpu.Barrier(num_barriers=plan.slots),
    }

    def body(*refs: Any) -> None:
        known = dict(zip((*given, *made, *scratch), refs, strict=True))
        if len(products) > 1:
            known["ready"] = pl.get_global(plgpu.SemaphoreType.REGULAR((products[0].tiles,)))
        views = [_view(product, known) for product in products]
        sm, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(lambda: _multiply(products, plan, views, sm))
        pl.when(warpgroup == 1)(lambda: _stream(products, plan, views, sm))

    found = plgpu.kernel(
        body,
        out_type=list(made.values()),
        scratch_types=list(scratch.values()),
        grid=(plan.sms,),
        grid_names=("sm",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="experts_few_" + "_".join("down" if p.gate is None else "up" for p in products),
    )(*given.values())
    return dict(zip(made, found, strict=True))


def _view(product: _Product, known: dict[str, Any]) -> SimpleNamespace:
    """The references that a product works with, by what they are to it."""
    names = ("rows", "gate_up", "shared_up", "hidden")
    if product.gate is None:
        names = ("hidden", "down", "shared_down", "out")
    roles = zip(("rows", "weight", "shared", "out"), names, strict=True)
    return SimpleNamespace(**(known | {role: known.get(name) for role, name in roles}))


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _each_item(
    product: _Product, plan: StreamPlan, refs: Any, sm: Any, before: Any, visit: Any
) -> Any:
    """Call visit(tile, block, turn, steps done) for an SM's items.

    before: steps done of other products. Returns the steps done after all items.
    """
    steps, blocks = product.inputs // plan.depth, jnp.int32(product.blocks)
    fixed = product.listed is not None  # which spares the kernel's first wait for memory
    tiles = jnp.int32(product.tiles) if fixed else refs.ends[refs.ends.shape[0] - 1]
    items = tiles * blocks
    turns = lax.div(items - sm + (plan.sms - 1), jnp.int32(plan.sms))

    @pl.loop(0, turns)
    def _item(turn: Any) -> None:
        item = sm + turn * plan.sms
        visit(lax.div(item, blocks), lax.rem(item, blocks), turn, before + turn * steps)

    return before + turns * steps


def _stream(products: tuple[_Product, ...], plan: StreamPlan, views: list[Any], sm: Any) -> None:
    """The loading warpgroup: weights and activations of every step, in order."""
    plgpu.set_max_registers(40, action="decrease")
    uses, free = jnp.int32(0), views[0].free
    for product, refs in zip(products, views, strict=True):
        load = partial(_load_item, product, plan, refs)
        uses = _each_item(product, plan, refs, sm, uses, load)

    @pl.loop(jnp.maximum(uses - plan.slots, 0), uses)  # every release must be seen before the end
    def _drain(use: Any) -> None:
        plgpu.barrier_wait(free.at[lax.rem(use, jnp.int32(plan.slots))])


def _load_item(
    product: _Product, plan: StreamPlan, refs: Any, tile: Any, block: Any, turn: Any, done: Any
) -> None:
    """The steps of one item; of the first that waits for its rows, the weights go ahead."""
    expert = _expert(product, refs, tile)
    row = pl.multiple_of(tile * plan.columns * int(product.gathered), 8)
    first, steps = block * product.width, product.inputs // plan.depth

    def slot(step: Any) -> Any:
        return lax.rem(done + step, jnp.int32(plan.slots))

    def put_weights(step: Any) -> None:
        at = slot(step)
        pl.when(done + step >= plan.slots)(lambda: plgpu.barrier_wait(refs.free.at[at]))
        _load_weights(product, plan, refs, expert, first, step * plan.depth, at)

    def put_rows(step: Any) -> None:
        at = slot(step)
        source = refs.rows.at[pl.ds(row, plan.columns), _along(plan, step * plan.depth)]
        plgpu.copy_gmem_to_smem(source, refs.columns.at[at], refs.full.at[at])

    ahead = jnp.int32(0)
    if product.waits:
        ahead = jnp.where(turn == 0, jnp.int32(min(plan.slots, steps)), 0)
        pl.loop(0, ahead)(put_weights)
        # All of this tile's first product; nobody waits before having done its share of that.
        needed = product.inputs // BLOCK
        plgpu.semaphore_wait(refs.ready.at[tile], needed, decrement=False, memory_scope="gpu")
        pl.loop(0, ahead)(put_rows)

    @pl.loop(ahead, steps)
    def _step(step: Any) -> None:
        put_weights(step)
        put_rows(step)


def _expert(product: _Product, refs: Any, tile: Any) -> Any:
    """The expert of a tile."""
    if product.listed is None:
        return refs.experts[tile]
    experts = refs.weight.shape[0]
    found = refs.experts[jnp.minimum(tile, product.listed - 1)]
    found = jnp.minimum(jnp.maximum(found, 0), experts - 1)
    return jnp.where(tile < product.listed, found, experts + tile - product.listed)


def _load_weights(
    product: _Product, plan: StreamPlan, refs: Any, expert: Any, first: Any, begin: Any, slot: Any
) -> None:
    """The weights of one step: rows from `first` on, elements from `begin` on."""

    def load(weight: Any, first: Any, begin: Any) -> None:
        for half in range(product.halves):
            if product.gate is not None:
                source = weight.at[half, _rows(first), _along(plan, begin)]
            else:
                source = weight.at[_rows(first + half * BLOCK), _along(plan, begin)]
            plgpu.copy_gmem_to_smem(source, refs.weights.at[slot, half], refs.full.at[slot])

    if not product.shared:
        load(refs.weight.at[expert], first, begin)
        return
    experts = refs.weight.shape[0]
    pl.when(expert < experts)(lambda: load(refs.weight.at[expert], first, begin))

    @pl.when(expert >= experts)
    def _shared() -> None:
        part = expert - experts
        if product.gate is not None:
            load(refs.shared, part * product.outputs + first, begin)
        else:
            load(refs.shared, first, part * product.inputs + begin)


def _along(plan: StreamPlan, begin: Any) -> Any:
    return pl.ds(pl.multiple_of(begin, plan.depth), plan.depth)


def _rows(first: Any) -> Any:
    return pl.ds(pl.multiple_of(first, BLOCK), BLOCK)


def _multiply(products: tuple[_Product, ...], plan: StreamPlan, views: list[Any], sm: Any) -> None:
    """The computing warpgroup."""
    plgpu.set_max_registers(232, action="increase")
    uses, counted = jnp.int32(0), len(products) > 1
    for product, refs in zip(products, views, strict=True):
        compute = partial(_compute_item, product, plan, refs, counted and product.gate is not None)
        uses = _each_item(product, plan, refs, sm, uses, compute)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _compute_item(
    product: _Product,
    plan: StreamPlan,
    refs: Any,
    counted: bool,
    tile: Any,
    block: Any,
    turn: Any,
    done: Any,
) -> None:
    """One item; counted: the tile's counter is told when the results are in memory."""
    del turn

    def products(*sums: Any) -> tuple[jax.Array, ...]:
        @pl.loop(0, product.inputs // plan.depth)
        def _step(step: Any) -> None:
            slot = lax.rem(done + step, jnp.int32(plan.slots))
            plgpu.barrier_wait(refs.full.at[slot])
            columns = refs.columns.at[slot].transpose((1, 0))
            for half, total in enumerate(sums):
                plgpu.wgmma(total, refs.weights.at[slot, half], columns)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(refs.free.at[slot])

        return tuple(total[...] for total in sums)

    shape = plgpu.ACC((BLOCK, plan.columns), jnp.float32)
    sums = pl.run_scoped(products, *[shape] * product.halves)
    if product.gate is not None:
        if product.bias:
            sums = _with_bias(refs, plan, sums, _expert(product, refs, tile), block)
        sums = (product.gate(*sums),)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the stores of the item before
    for half, value in enumerate(sums):
        refs.results.at[half].transpose((1, 0))[...] = value.astype(product.dtype)
    plgpu.commit_smem()
    places = pl.ds(tile * plan.columns, plan.columns)
    for half in range(len(sums)):
        across = _rows(block * product.width + half * BLOCK)
        plgpu.copy_smem_to_gmem(refs.results.at[half], refs.out.at[places, across])
    if counted:
        plgpu.wait_smem_to_gmem(0)
        plgpu.semaphore_signal(refs.ready.at[tile], 1, memory_scope="gpu")


def _with_bias(refs: Any, plan: StreamPlan, sums: Any, expert: Any, block: Any) -> Any:
    added = []
    for half, total in enumerate(sums):
        source = refs.bias.at[expert, half, _rows(block * BLOCK)]
        bias = plgpu.load(source, layout=PER_ROW, optimized=False)
        added.append(total + lax.broadcast_in_dim(bias, (BLOCK, plan.columns), [0]))
    return tuple(added)
