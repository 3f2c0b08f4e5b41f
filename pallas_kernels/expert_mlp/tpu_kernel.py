"""The TPU kernel: tile after tile through its expert, while the next weights are on their way.

An expert's weights come in chunks of its hidden layer, which Pallas's pipeline fetches two deep,
over the border between experts too. Tiles behind the last live one name its chunk again, so that
nothing moves.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.expert_mlp.checks import Gate
from pallas_kernels.expert_mlp.tpu_tiles import Tiles

VMEM_LIMIT = 48 * 2**20
"""Bytes of vector memory that the kernel may use; the smallest chip has 64 MiB."""

_COLUMNS = 1024
"""Of the second product's result at once: what lies between product and sum stays small."""


@dataclass(frozen=True, slots=True)
class TPUPlan:
    """rows: of activations of a tile. chunk: of an expert's hidden layer, in one fetch.

    gather: tiles hold their expert's own tokens, else all tokens. parts: tiles are dealt over so
    many, which the cores of a chip share.
    """

    rows: int
    chunk: int
    gather: bool
    parts: int


def vmem_bytes(plan: TPUPlan, model: int, itemsize: int) -> int:
    """Bytes of a plan's buffers, and of the values of one step."""
    out = itemsize if plan.gather else 4
    buffers = 2 * plan.rows * model * (itemsize + out) + plan.rows * model * 4
    weights = 2 * 3 * max(128, plan.chunk) * model * itemsize
    return buffers + weights + 4 * plan.rows * (3 * max(128, plan.chunk) + _COLUMNS)


@dataclass(frozen=True, slots=True)
class _Problem:
    plan: TPUPlan
    given: int
    tiles: int
    chunks: int
    gate: Gate
    bias: bool
    turned: bool
    precision: lax.Precision | None


def serve_tiles(
    x: Float[Array, "rows model"],
    work: Tiles,
    table: Float[Array, "tokens lanes"] | None,
    *,
    gate_up: Float[Array, "experts 2 ffn model"],
    down: Float[Array, "experts model ffn"],
    bias: Float[Array, "experts 2 ffn"] | None,
    gate: Gate,
    plan: TPUPlan,
    interpret: Any,
) -> Float[Array, "places model"]:
    """Every live tile's rows through its expert: in their own places, or multiplied and added up.

    table: with plan.gather None, and the result has `rows` places for each tile in x's dtype, which
    hold anything behind the live ones; else each expert's share of each token, and the result is
    float32, for each part the sum over its tiles.
    """
    ffn, model = gate_up.shape[2:]
    tiles = -(-work.expert.shape[0] // plan.parts) * plan.parts
    problem = _Problem(
        plan=plan,
        given=work.expert.shape[0],
        tiles=tiles,
        chunks=ffn // plan.chunk,
        gate=gate,
        bias=bias is not None,
        turned=ffn % 128 != 0,
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    )
    blocks = tiles + plan.parts if plan.gather else plan.parts
    touched = min(tiles, gate_up.shape[0])
    return pl.pallas_call(
        functools.partial(_kernel, problem),
        grid_spec=_grid(problem, model, x.dtype),
        out_shape=jax.ShapeDtypeStruct(
            (blocks * plan.rows, model), x.dtype if plan.gather else jnp.float32
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=6 * tiles * plan.rows * ffn * model,
            bytes_accessed=3 * touched * ffn * model * gate_up.dtype.itemsize,
            transcendentals=tiles * plan.rows * ffn,
        ),
        interpret=interpret,
        name="expert_mlp",
    )(
        jnp.pad(work.expert, (0, tiles - work.expert.shape[0])),
        work.live[None],
        x,
        jnp.zeros((8, 128), jnp.float32) if table is None else table,
        gate_up,
        # As XLA lays such a weight out by itself: anything else would be a copy of all of it.
        jnp.swapaxes(down, 1, 2) if problem.turned else down,
        jnp.zeros((1, 2, plan.chunk), x.dtype) if bias is None else bias,
    )


def _grid(problem: _Problem, model: int, dtype: Any) -> pltpu.PrefetchScalarGridSpec:
    """Part, tile of the part, chunk; everything comes and goes by itself."""
    plan = problem.plan

    def where(part: Any, i: Any, chunk: Any, live: Any) -> tuple[Any, Any, Any]:
        """The tile and chunk to have there: behind the part's last live tile, what is there."""
        tile = i * plan.parts + part
        alive = tile < live[0]
        last = jnp.maximum(live[0] - 1 - part, 0) // plan.parts * plan.parts + part
        last = jnp.minimum(last, problem.given - 1)  # there may be fewer tiles than parts
        return jnp.where(alive, tile, last), jnp.where(alive, chunk, problem.chunks - 1), alive

    def up(part: Any, i: Any, chunk: Any, expert: Any, live: Any) -> tuple[Any, ...]:
        tile, chunk, _ = where(part, i, chunk, live)
        return (expert[tile], 0, chunk, 0)

    def down(part: Any, i: Any, chunk: Any, expert: Any, live: Any) -> tuple[Any, ...]:
        tile, chunk, _ = where(part, i, chunk, live)
        return (expert[tile], chunk, 0) if problem.turned else (expert[tile], 0, chunk)

    def bias(part: Any, i: Any, chunk: Any, expert: Any, live: Any) -> tuple[Any, ...]:
        tile, chunk, _ = where(part, i, chunk, live)
        return (expert[tile], 0, chunk) if problem.bias else (0, 0, 0)

    def rows(part: Any, i: Any, chunk: Any, expert: Any, live: Any) -> tuple[Any, ...]:
        del expert
        return (where(part, i, chunk, live)[0] if plan.gather else 0, 0)

    def out(part: Any, i: Any, chunk: Any, expert: Any, live: Any) -> tuple[Any, ...]:
        del expert
        if not plan.gather:
            return (part, 0)
        # Dead tiles share a block of their part's own, so that no other's result is written over.
        tile, _, alive = where(part, i, chunk, live)
        return (jnp.where(alive, tile, problem.tiles + part), 0)

    down_block = (plan.chunk, model) if problem.turned else (model, plan.chunk)
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(plan.parts, problem.tiles // plan.parts, problem.chunks),
        in_specs=[
            pl.BlockSpec((plan.rows, model), rows),
            pl.BlockSpec(memory_space=pltpu.VMEM),
            pl.BlockSpec((1, 2, plan.chunk, model), up),
            pl.BlockSpec((1, *down_block), down),
            pl.BlockSpec((1, 2, plan.chunk), bias),
        ],
        out_specs=pl.BlockSpec((plan.rows, model), out),
        scratch_shapes=[pltpu.VMEM((plan.rows, model), jnp.float32)],
    )


def _kernel(
    problem: _Problem,
    expert: Any,
    live: Any,
    x: Any,
    table: Any,
    gate_up: Any,
    down: Any,
    bias: Any,
    out: Any,
    total: Any,
) -> None:
    plan = problem.plan
    part, i, chunk = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tile = i * plan.parts + part

    @pl.when((chunk == 0) & (plan.gather | (i == 0)))
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(tile < live[0])
    def _() -> None:
        product = functools.partial(_product, precision=problem.precision)
        one, two = product(x[...], gate_up[0, 0]), product(x[...], gate_up[0, 1])
        if problem.bias:
            added = bias[0].astype(jnp.float32)
            one, two = one + added[0:1], two + added[1:2]
        hidden = problem.gate(one, two)
        if not plan.gather:
            column = lax.broadcasted_iota(jnp.int32, table.shape, 1)
            mine = jnp.where(column == expert[tile], table[...], 0)
            share = jnp.sum(mine, axis=1, keepdims=True)
            hidden = jnp.where(share != 0, share * hidden, 0)
        hidden = hidden.astype(x.dtype)
        model = total.shape[1]
        for start in range(0, model, _COLUMNS):
            columns = pl.ds(start, min(_COLUMNS, model - start))
            if problem.turned:
                total[:, columns] += product(hidden, down[0, :, columns], turned=True)
            else:
                total[:, columns] += product(hidden, down[0, columns])

    last = (chunk == problem.chunks - 1) & (plan.gather | (i == problem.tiles // plan.parts - 1))

    @pl.when(last)
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


def _product(
    rows: Any, weight: Any, *, precision: lax.Precision | None, turned: bool = False
) -> Any:
    """rows [n, in] with a weight [out, in], or [in, out] if turned."""
    return lax.dot_general(
        rows,
        weight,
        (((1,), (0 if turned else 1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
