"""Products of a few rows with many experts on Hopper: weights stream once through shared memory.

Operands are swapped: 64 rows of a weight are the matrix unit's left side and a tile's few rows of
activations its right, so that a tile of 8 rows costs 8 columns and not 64 rows. One warpgroup
streams, the other multiplies; both products of an expert, gate/up and down, are of this shape.
"""

from collections.abc import Callable
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

from pallas_kernels.expert_mlp.gpu_tiles import Tiles

BLOCK = 64  # rows of a weight that one product of the matrix unit takes
_HALVES = 2  # such blocks that a step takes: of the gate and of up, or of down twice
TILE = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)

Gate = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """sms: blocks of threads; columns: activation rows of a tile, a multiple of 8.

    depth: elements of a weight row that a step takes; slots: steps in flight.
    """

    sms: int
    columns: int
    depth: int
    slots: int


def stream_plan(columns: int, inputs: int, sms: int, shared_memory: int) -> StreamPlan:
    """As many steps in flight as shared memory holds."""
    depth = 128 if inputs % 128 == 0 else 64
    step = (_HALVES * BLOCK + columns) * depth * 2
    room = shared_memory - 2048 - _HALVES * BLOCK * columns * 2
    return StreamPlan(sms=sms, columns=columns, depth=depth, slots=min(room // step, 16))


@dataclass(frozen=True, slots=True)
class _Product:
    """One kernel's static facts: gate None means a plain product (down)."""

    gate: Gate | None
    bias: bool
    shared: bool
    gathered: bool
    inputs: int
    outputs: int
    dtype: Any
    interpret: Any

    @property
    def halves(self) -> int:
        """Blocks of weight rows of a step."""
        return _HALVES if self.gate is not None or self.outputs % (2 * BLOCK) == 0 else 1

    @property
    def width(self) -> int:
        """Columns of the output that one item of work makes."""
        return BLOCK if self.gate is not None else BLOCK * self.halves


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("gate", "plan", "interpret"))
def gated_product(
    rows: Float[Array, "rows model"],
    weight: Float[Array, "experts 2 ffn model"],
    shared: Float[Array, "2 shared_ffn model"] | None,
    bias: Float[Array, "experts 2 ffn"] | None,
    tiles: Tiles,
    *,
    gate: Gate,
    plan: StreamPlan,
    interpret: Any = None,
) -> Float[Array, "places ffn"]:
    """gate(rows @ gate.T, rows @ up.T) of each tile's rows with its expert.

    Tile i writes plan.columns places from i * plan.columns on, and reads the rows there, or all
    tokens. Experts past the last one are the parts of the shared expert, each as wide as an expert.
    """
    product = _Product(
        gate=gate,
        bias=bias is not None,
        shared=shared is not None,
        gathered=tiles.token is not None,
        inputs=weight.shape[3],
        outputs=weight.shape[2],
        dtype=rows.dtype,
        interpret=interpret,
    )
    return _call(product, plan, rows, weight, shared, bias, tiles)


@partial(jax.jit, static_argnames=("plan", "interpret"))
def product(
    rows: Float[Array, "places ffn"],
    weight: Float[Array, "experts model ffn"],
    shared: Float[Array, "model shared_ffn"] | None,
    tiles: Tiles,
    *,
    plan: StreamPlan,
    interpret: Any = None,
) -> Float[Array, "places model"]:
    """rows @ weight.T of each tile's places with its expert."""
    shape = _Product(
        gate=None,
        bias=False,
        shared=shared is not None,
        gathered=True,
        inputs=weight.shape[2],
        outputs=weight.shape[1],
        dtype=rows.dtype,
        interpret=interpret,
    )
    return _call(shape, plan, rows, weight, shared, None, tiles)


def _call(
    product: _Product,
    plan: StreamPlan,
    rows: Any,
    weight: Any,
    shared: Any,
    bias: Any,
    tiles: Tiles,
) -> jax.Array:
    named = {"rows": rows, "weight": weight, "experts": tiles.expert, "ends": tiles.ends}
    if shared is not None:
        named["shared"] = shared
    if bias is not None:
        named["bias"] = bias.astype(jnp.float32)
    scratch = {
        "weights": _swizzled((plan.slots, product.halves, BLOCK, plan.depth), product.dtype),
        "columns": _swizzled((plan.slots, plan.columns, plan.depth), product.dtype),
        "results": plgpu.SMEM((product.halves, plan.columns, BLOCK), product.dtype),
        "full": plgpu.Barrier(num_arrivals=product.halves + 1, num_barriers=plan.slots),
        "free": plgpu.Barrier(num_barriers=plan.slots),
    }

    def body(*refs: Any) -> None:
        given = SimpleNamespace(**dict(zip((*named, "out", *scratch), refs, strict=True)))
        sm, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(lambda: _multiply(product, plan, given, sm))
        pl.when(warpgroup == 1)(lambda: _stream(product, plan, given, sm))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (tiles.expert.shape[0] * plan.columns, product.outputs), product.dtype
        ),
        scratch_types=list(scratch.values()),
        grid=(plan.sms,),
        grid_names=("sm",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=product.interpret,
        kernel_name=f"experts_few_{'down' if product.gate is None else 'up'}",
    )(*named.values())


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _each_item(product: _Product, plan: StreamPlan, refs: Any, sm: Any, visit: Any) -> Any:
    """Call visit(tile, block, steps done) for an SM's items; returns the steps of all of them."""
    blocks, steps = product.outputs // product.width, product.inputs // plan.depth
    items = refs.ends[refs.ends.shape[0] - 1] * blocks
    turns = lax.div(items - sm + (plan.sms - 1), jnp.int32(plan.sms))

    @pl.loop(0, turns)
    def _item(turn: Any) -> None:
        item = sm + turn * plan.sms
        visit(lax.div(item, jnp.int32(blocks)), lax.rem(item, jnp.int32(blocks)), turn * steps)

    return turns * steps


def _stream(product: _Product, plan: StreamPlan, refs: Any, sm: Any) -> None:
    """The loading warpgroup: weights and activations of every step, in order."""
    plgpu.set_max_registers(40, action="decrease")
    steps = product.inputs // plan.depth

    def load(tile: Any, block: Any, done: Any) -> None:
        expert = refs.experts[tile]
        row = pl.multiple_of(tile * plan.columns, 8) if product.gathered else 0
        first = block * product.width

        @pl.loop(0, steps)
        def _step(step: Any) -> None:
            use = done + step
            slot = lax.rem(use, jnp.int32(plan.slots))
            pl.when(use >= plan.slots)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
            _load_weights(product, plan, refs, expert, first, step * plan.depth, slot)
            plgpu.copy_gmem_to_smem(
                refs.rows.at[pl.ds(row, plan.columns), _along(plan, step * plan.depth)],
                refs.columns.at[slot],
                refs.full.at[slot],
            )

    uses = _each_item(product, plan, refs, sm, load)

    @pl.loop(jnp.maximum(uses - plan.slots, 0), uses)  # every release must be seen before the end
    def _drain(use: Any) -> None:
        plgpu.barrier_wait(refs.free.at[lax.rem(use, jnp.int32(plan.slots))])


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


def _multiply(product: _Product, plan: StreamPlan, refs: Any, sm: Any) -> None:
    """The computing warpgroup."""
    plgpu.set_max_registers(232, action="increase")
    steps = product.inputs // plan.depth

    def compute(tile: Any, block: Any, done: Any) -> None:
        def products(*sums: Any) -> tuple[jax.Array, ...]:
            @pl.loop(0, steps)
            def _step(step: Any) -> None:
                slot = lax.rem(done + step, jnp.int32(plan.slots))
                plgpu.barrier_wait(refs.full.at[slot])
                for half, total in enumerate(sums):
                    plgpu.wgmma(
                        total, refs.weights.at[slot, half], refs.columns.at[slot].transpose((1, 0))
                    )
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(refs.free.at[slot])

            return tuple(total[...] for total in sums)

        shape = plgpu.ACC((BLOCK, plan.columns), jnp.float32)
        sums = pl.run_scoped(products, *[shape] * product.halves)
        if product.gate is not None:
            if product.bias:
                sums = _with_bias(refs, plan, sums, refs.experts[tile], block)
            sums = (product.gate(*sums),)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the stores of the item before
        for half, value in enumerate(sums):
            refs.results.at[half].transpose((1, 0))[...] = value.astype(product.dtype)
        plgpu.commit_smem()
        places = pl.ds(tile * plan.columns, plan.columns)
        for half in range(len(sums)):
            across = _rows(block * product.width + half * BLOCK)
            plgpu.copy_smem_to_gmem(refs.results.at[half], refs.out.at[places, across])

    _each_item(product, plan, refs, sm, compute)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _with_bias(refs: Any, plan: StreamPlan, sums: Any, expert: Any, block: Any) -> Any:
    added = []
    for half, total in enumerate(sums):
        source = refs.bias.at[expert, half, _rows(block * BLOCK)]
        bias = plgpu.load(source, layout=PER_ROW, optimized=False)
        added.append(total + lax.broadcast_in_dim(bias, (BLOCK, plan.columns), [0]))
    return tuple(added)
