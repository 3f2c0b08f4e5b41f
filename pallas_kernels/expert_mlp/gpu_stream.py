"""Products of a few rows with many experts on Hopper: weights stream once through shared memory.

Operands are swapped: 64 rows of a weight are the matrix unit's left side and a tile's few rows of
activations its right, so that a tile of 8 rows costs 8 columns and not 64 rows. One warpgroup
streams, the other multiplies. Where an expert has many rows, its tiles are multiplied in runs of
several, so that its weights are not read again for each. Both products of an expert, gate/up and
down, are of this shape, and are one kernel: a run's second product begins when its counter says
that all of its first is there, and its weights are on their way by then.
"""

from dataclasses import replace
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
from pallas_kernels.expert_mlp.gpu_stream_items import BLOCK, HALVES, Product, StreamPlan
from pallas_kernels.expert_mlp.gpu_stream_load import stream
from pallas_kernels.expert_mlp.gpu_stream_multiply import multiply
from pallas_kernels.expert_mlp.gpu_tiles import Tiles
from pallas_kernels.expert_mlp.shared import SharedExpert


def slots(high: int, depth: int, shared_memory: int) -> int:
    """Steps in flight that shared memory holds."""
    room = shared_memory - 2048 - HALVES * BLOCK * high * 2
    return min(room // ((HALVES * BLOCK + high) * depth * 2), 16)


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
    runs = tiles.runs or tiles
    listing = {"experts": runs.expert, "ends": runs.ends}
    if tiles.runs is not None:
        listing |= {"offsets": tiles.runs.offset, "tile_ends": tiles.runs.end}
    most = runs.expert.shape[0]
    if listed is not None:
        most = listed + (0 if shared is None else shared.down.shape[1] // ffn)
    facts = (shared is not None, listed, most, rows.dtype)
    # Where the last product's steps are of another shape, the kernels cannot share the ring.
    chained = plan.chained and model % (2 * BLOCK) == 0
    first = Product(
        *facts,
        gate=gate,
        bias=bias is not None,
        gathered=tiles.token is not None,
        waits=False,
        inputs=model,
        outputs=ffn,
    )
    second = replace(
        first, gate=None, bias=False, gathered=True, waits=chained, inputs=ffn, outputs=model
    )
    places = most * plan.columns if tiles.token is None else tiles.token.shape[0]
    hidden = {"hidden": jax.ShapeDtypeStruct((places, ffn), rows.dtype)}
    out = {"out": jax.ShapeDtypeStruct((places, model), rows.dtype)}
    up = {"rows": rows, "gate_up": gate_up}
    if bias is not None:
        up["bias"] = bias.astype(jnp.float32)
    if shared is not None:
        up["shared_up"] = shared.gate_up
    back = {"down": down} | ({} if shared is None else {"shared_down": shared.down})
    call = partial(_call, plan, listing, interpret)
    if chained:
        return call((first, second), up | back, hidden | out)["out"]
    return call((second,), call((first,), up, hidden) | back, out)["out"]


def _call(
    plan: StreamPlan,
    listing: dict[str, Any],
    interpret: Any,
    products: tuple[Product, ...],
    given: dict[str, Any],
    made: dict[str, Any],
) -> dict[str, jax.Array]:
    """One kernel that makes `made` of `given`."""
    given = given | listing
    halves, dtype = products[0].halves, products[0].dtype
    scratch = {
        "weights": _swizzled((plan.slots, halves, BLOCK, plan.depth), dtype),
        "columns": _swizzled((plan.slots, plan.high, plan.depth), dtype),
        "results": plgpu.SMEM((halves, plan.high, BLOCK), dtype),
        "full": plgpu.Barrier(num_arrivals=halves + 1, num_barriers=plan.slots),
        "free": plgpu.Barrier(num_barriers=plan.slots),
    }

    def body(*refs: Any) -> None:
        known = dict(zip((*given, *made, *scratch), refs, strict=True))
        if len(products) > 1:
            known["ready"] = pl.get_global(plgpu.SemaphoreType.REGULAR((products[0].runs,)))
        views = [_view(product, known) for product in products]
        sm, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(lambda: multiply(products, plan, views, sm))
        pl.when(warpgroup == 1)(lambda: stream(products, plan, views, sm))

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


def _view(product: Product, known: dict[str, Any]) -> SimpleNamespace:
    """The references that a product works with, by what they are to it."""
    names = ("rows", "gate_up", "shared_up", "hidden")
    if product.gate is None:
        names = ("hidden", "down", "shared_down", "out")
    roles = zip(("rows", "weight", "shared", "out"), names, strict=True)
    return SimpleNamespace(**(known | {role: known.get(name) for role, name in roles}))


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
