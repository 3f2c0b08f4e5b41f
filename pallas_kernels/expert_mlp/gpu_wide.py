"""Products of many rows with every expert on Hopper: 128 at a time, the matrix unit rules.

Two warpgroups multiply 64 rows each with the same block of weights, a third one loads for both.
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

ROWS = 128  # of a tile
_WORKERS = 2  # computing warpgroups
_SHARE = ROWS // _WORKERS
_DEPTH = 64  # elements of a row that a step takes
_WIDTHS = (128, 96, 64)  # weight rows of half a block: of the gate and of up, or of down twice

Gate = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class WidePlan:
    """sms: blocks of threads; slots: steps in flight."""

    sms: int
    slots: int = 4


@dataclass(frozen=True, slots=True)
class _Product:
    """One kernel's static facts: gate None means a plain product (down)."""

    gate: Gate | None
    bias: bool
    inputs: int
    outputs: int
    dtype: Any
    interpret: Any

    @property
    def half(self) -> int:
        """Weight rows of half a block."""
        unit = 1 if self.gate is not None else 2
        return next(each for each in _WIDTHS if self.outputs % (unit * each) == 0)

    @property
    def width(self) -> int:
        """Columns of the output that one item of work makes."""
        return self.half if self.gate is not None else 2 * self.half


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("gate", "plan", "interpret"))
def gated_product(
    rows: Float[Array, "rows model"],
    weight: Float[Array, "experts 2 ffn model"],
    bias: Float[Array, "experts 2 ffn"] | None,
    tiles: Tiles,
    *,
    gate: Gate,
    plan: WidePlan,
    interpret: Any = None,
) -> Float[Array, "places ffn"]:
    """gate(rows @ gate.T, rows @ up.T) of each tile's 128 rows with its expert.

    Tile i reads and writes the 128 places from i * 128 on.
    """
    product = _Product(
        gate=gate,
        bias=bias is not None,
        inputs=weight.shape[3],
        outputs=weight.shape[2],
        dtype=rows.dtype,
        interpret=interpret,
    )
    return _call(product, plan, rows, weight, bias, tiles)


@partial(jax.jit, static_argnames=("plan", "interpret"))
def product(
    rows: Float[Array, "places ffn"],
    weight: Float[Array, "experts model ffn"],
    tiles: Tiles,
    *,
    plan: WidePlan,
    interpret: Any = None,
) -> Float[Array, "places model"]:
    """rows @ weight.T of each tile's places with its expert."""
    shape = _Product(
        gate=None,
        bias=False,
        inputs=weight.shape[2],
        outputs=weight.shape[1],
        dtype=rows.dtype,
        interpret=interpret,
    )
    return _call(shape, plan, rows, weight, None, tiles)


def _call(
    product: _Product,
    plan: WidePlan,
    rows: Any,
    weight: Any,
    bias: Any,
    tiles: Tiles,
) -> jax.Array:
    named = {"rows": rows, "weight": weight, "experts": tiles.expert, "ends": tiles.ends}
    if bias is not None:
        named["bias"] = bias.astype(jnp.float32)
    scratch = {
        "lines": _swizzled((plan.slots, ROWS, _DEPTH), product.dtype),
        "weights": _swizzled((plan.slots, 2 * product.half, _DEPTH), product.dtype),
        "results": _swizzled((_WORKERS, _SHARE, product.half), product.dtype),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=plan.slots),
        "free": plgpu.Barrier(num_arrivals=_WORKERS, num_barriers=plan.slots),
    }

    def body(*refs: Any) -> None:
        given = SimpleNamespace(**dict(zip((*named, "out", *scratch), refs, strict=True)))
        sm, worker = lax.axis_index("sm"), lax.axis_index("warpgroup")
        pl.when(worker < _WORKERS)(lambda: _multiply(product, plan, given, sm, worker))
        pl.when(worker == _WORKERS)(lambda: _stream(product, plan, given, sm))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (tiles.expert.shape[0] * ROWS, product.outputs), product.dtype
        ),
        scratch_types=list(scratch.values()),
        grid=(plan.sms,),
        grid_names=("sm",),
        num_threads=_WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=product.interpret,
        kernel_name=f"experts_many_{'down' if product.gate is None else 'up'}",
    )(*named.values())


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    columns = 64 if shape[-1] % 64 == 0 else 32
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * 2))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _each_item(product: _Product, plan: WidePlan, refs: Any, sm: Any, visit: Any) -> Any:
    """Call visit(tile, block, steps done) for an SM's items; returns the steps of all of them."""
    blocks, steps = product.outputs // product.width, product.inputs // _DEPTH
    items = refs.ends[refs.ends.shape[0] - 1] * blocks
    turns = lax.div(items - sm + (plan.sms - 1), jnp.int32(plan.sms))

    @pl.loop(0, turns)
    def _item(turn: Any) -> None:
        item = sm + turn * plan.sms
        visit(lax.div(item, jnp.int32(blocks)), lax.rem(item, jnp.int32(blocks)), turn * steps)

    return turns * steps


def _stream(product: _Product, plan: WidePlan, refs: Any, sm: Any) -> None:
    """The loading warpgroup: weights and activations of every step, in order."""
    plgpu.set_max_registers(40, action="decrease")
    half = product.half

    def load(tile: Any, block: Any, done: Any) -> None:
        expert = refs.experts[tile]
        row = pl.multiple_of(tile * ROWS, ROWS)
        first = block * product.width

        @pl.loop(0, product.inputs // _DEPTH)
        def _step(step: Any) -> None:
            use = done + step
            slot = lax.rem(use, jnp.int32(plan.slots))
            across = pl.ds(pl.multiple_of(step * _DEPTH, _DEPTH), _DEPTH)
            pl.when(use >= plan.slots)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
            plgpu.copy_gmem_to_smem(
                refs.rows.at[pl.ds(row, ROWS), across], refs.lines.at[slot], refs.full.at[slot]
            )
            for which in range(2):
                if product.gate is not None:
                    source = refs.weight.at[expert, which, _rows(first, half), across]
                else:
                    source = refs.weight.at[expert, _rows(first + which * half, half), across]
                plgpu.copy_gmem_to_smem(
                    source,
                    refs.weights.at[slot, pl.ds(which * half, half)],
                    refs.full.at[slot],
                )

    uses = _each_item(product, plan, refs, sm, load)

    @pl.loop(jnp.maximum(uses - plan.slots, 0), uses)  # every release must be seen before the end
    def _drain(use: Any) -> None:
        plgpu.barrier_wait(refs.free.at[lax.rem(use, jnp.int32(plan.slots))])


def _rows(first: Any, size: int) -> Any:
    return pl.ds(pl.multiple_of(first, 32), size)


def _multiply(product: _Product, plan: WidePlan, refs: Any, sm: Any, worker: Any) -> None:
    """A computing warpgroup: its 64 rows of every tile."""
    plgpu.set_max_registers(232, action="increase")
    steps, half = product.inputs // _DEPTH, product.half
    mine = pl.ds(worker * _SHARE, _SHARE)

    def slot(use: Any) -> Any:
        return lax.rem(use, jnp.int32(plan.slots))

    def compute(tile: Any, block: Any, done: Any) -> None:
        def products(total: Any) -> jax.Array:
            @pl.loop(0, steps)
            def _step(step: Any) -> None:
                at = slot(done + step)
                plgpu.barrier_wait(refs.full.at[at])
                plgpu.wgmma(total, refs.lines.at[at, mine], refs.weights.at[at].transpose((1, 0)))
                plgpu.wgmma_wait(1)  # the products of the step before are done
                before = slot(done + step - 1)
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(refs.free.at[before]))

            return total[...]

        total = pl.run_scoped(products, plgpu.ACC((_SHARE, 2 * half), jnp.float32))
        plgpu.barrier_arrive(refs.free.at[slot(done + steps - 1)])
        sums = (total[:, :half], total[:, half:])
        if product.gate is not None:
            if product.bias:
                sums = _with_bias(refs, sums, half, refs.experts[tile], block)
            sums = (product.gate(*sums),)
        line = refs.results.at[worker]
        places = pl.ds(tile * ROWS + worker * _SHARE, _SHARE)
        for which, value in enumerate(sums):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the store before
            line[...] = value.astype(product.dtype)
            plgpu.commit_smem()
            across = _rows(block * product.width + which * half, half)
            plgpu.copy_smem_to_gmem(line, refs.out.at[places, across])

    _each_item(product, plan, refs, sm, compute)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _with_bias(refs: Any, sums: Any, half: int, expert: Any, block: Any) -> Any:
    added = []
    for which, total in enumerate(sums):
        source = refs.bias.at[expert, which, _rows(block * half, half)]
        bias = plgpu.load(source, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        added.append(total + lax.broadcast_in_dim(bias, (_SHARE, half), [1]))
    return tuple(added)
