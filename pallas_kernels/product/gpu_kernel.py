"""One product on Hopper: persistent blocks of threads, each with its own rows of the weight.

Tokens are the rows of the matrix unit, rows of the weight its columns: a tile may then be any
multiple of 8 rows, so that every SM gets the same share of the weight. Two blocks of threads in a
cluster read tokens, or the weight, once together.
"""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.product.gpu_plan import ROWS, Plan, swizzle

ACTIVATIONS: Final[dict[str, Callable[[jax.Array], jax.Array]]] = {
    "silu": lambda x: x / (1 + jnp.exp(-x)),
    "gelu_tanh": lambda x: x * 0.5 * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * (x * x * x)))),
    "relu": lambda x: jnp.maximum(x, 0.0),
}
_BAND = 8  # tiles of tokens that are walked together: their tokens and weights stay in the L2


def _tiles(columns: int, dtype: Any) -> tuple[Any, ...]:
    """How rows of so many columns lie in shared memory."""
    size = jnp.dtype(dtype).itemsize
    wide = swizzle(columns, size)
    return (plgpu.TilingTransform((8, wide // size)), plgpu.SwizzleTransform(wide)) if wide else ()


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("plan", "out_dtype", "activation", "read_ahead", "interpret"))
def multiply(
    x: Float[Array, "tokens in"],
    weight: Float[Array, "parts out in"],
    *,
    plan: Plan,
    out_dtype: Any,
    activation: str | None,
    read_ahead: bool,
    interpret: Any = None,
) -> Float[Array, "tokens out"]:
    """x @ weight.T in tiles; with two parts, activation(x @ gate.T) * (x @ up.T).

    tokens: a multiple of 8. read_ahead: read weights before the kernels before this one have ended.
    """
    parts, outputs, _ = weight.shape
    blocks, size = plan.blocks, jnp.dtype(out_dtype).itemsize
    chunk, stored = plan.chunk(size), (blocks, plan.chunks(size), ROWS, plan.chunk(size))

    def narrow(*shape: int) -> Any:
        return plgpu.SMEM(shape, x.dtype, transforms=_tiles(plan.depth, x.dtype))

    released: dict[str, Any] = {"num_arrivals": blocks, "num_barriers": plan.slots}
    scratch = {
        "tokens": narrow(plan.slots, plan.height, plan.depth),
        "weights": narrow(plan.slots, parts * plan.columns, plan.depth),
        "result": plgpu.SMEM(stored, out_dtype, transforms=_tiles(chunk, out_dtype)),
        "full": plgpu.Barrier(num_arrivals=1 + parts, num_barriers=plan.slots),
        "free": plgpu.ClusterBarrier(collective_axes=("peer",), **released)
        if plan.cluster > 1
        else plgpu.Barrier(**released),
    }

    def body(x_ref: Any, weight_ref: Any, out_ref: Any, *given: Any) -> None:
        named = dict(zip(scratch, given, strict=True))
        refs = SimpleNamespace(x=x_ref, weight=weight_ref, out=out_ref, **named)
        here = _Here(plan, x.shape[0], weight.shape)
        # Only the interpreter knows nothing of kernels that begin before the one before has ended.
        waits = interpret is None
        worker = lax.axis_index("warpgroup")
        pl.when(worker == blocks)(lambda: _stream(here, refs, read_ahead, waits))
        pl.when(worker < blocks)(lambda: _compute(here, refs, worker, activation, waits))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.shape[0], outputs), out_dtype),
        scratch_types=list(scratch.values()),
        grid=(min(plan.clusters, math.prod(_grid(plan, x.shape[0], outputs))),),
        grid_names=("cluster",),
        cluster=(plan.cluster,),
        cluster_names=("peer",),
        num_threads=blocks + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x, weight)


class _Here:
    """Where a block of threads is in the product: its tiles, and the steps of each."""

    def __init__(self, plan: Plan, tokens: int, weight: tuple[int, int, int]) -> None:
        self.plan, self.tokens = plan, tokens
        self.parts, self.outputs, inputs = weight
        self.height = min(plan.height, tokens)  # of a tile
        self.down, across = _grid(plan, tokens, self.outputs)
        self.tiles = self.down * across  # a cluster's tile is those of its peers together
        self.clusters = min(plan.clusters, self.tiles)
        self.steps = inputs // plan.depth  # of one tile
        self.cluster, self.peer = lax.axis_index("cluster"), lax.axis_index("peer")
        self.turns = (self.tiles - self.cluster + self.clusters - 1) // self.clusters

    def tile(self, turn: Any) -> tuple[Any, Any]:
        """First token, and first row of the weight, of the tile of this turn.

        The last tiles may overlap the ones before: what is computed twice comes out the same.
        """
        across, down = self.cluster + turn * self.clusters, jnp.int32(0)
        if self.down > 1:
            per_band = _BAND * (self.tiles // self.down)
            band = lax.div(across, jnp.int32(per_band))
            rest = across - band * per_band
            size = jnp.minimum(self.down - band * _BAND, _BAND)
            across, down = lax.div(rest, size), band * _BAND + lax.rem(rest, size)
        if self.plan.shares_weights:
            down = down * self.plan.cluster + self.peer
        else:
            across = across * self.plan.cluster + self.peer
        token = jnp.minimum(down * self.height, self.tokens - self.height)
        row = jnp.minimum(across * self.plan.columns, self.outputs - self.plan.columns)
        return pl.multiple_of(token, 8), pl.multiple_of(row, 8)

    def slot(self, step: Any) -> Any:
        """The slot of a step, counted over all turns."""
        return lax.rem(step, jnp.int32(self.plan.slots))

    def inputs(self, step: Any) -> Any:
        """The elements of the inputs that a step multiplies."""
        index = lax.rem(step, jnp.int32(self.steps))
        return pl.ds(pl.multiple_of(index * self.plan.depth, 64), self.plan.depth)


def _grid(plan: Plan, tokens: int, outputs: int) -> tuple[int, int]:
    """Tiles of a cluster, along tokens and along rows of the weight."""
    shared = (plan.cluster, 1) if plan.shares_weights else (1, plan.cluster)
    return (
        -(-tokens // (min(plan.height, tokens) * shared[0])),
        -(-outputs // (plan.columns * shared[1])),
    )


def _stream(here: _Here, refs: Any, read_ahead: bool, waits: bool) -> None:
    """The loading warpgroup: weights and tokens of every step, as slots come free."""
    plgpu.set_max_registers(40, action="decrease")
    plan, total = here.plan, here.turns * here.steps
    peers = "peer" if plan.cluster > 1 else None

    def weights(step: Any) -> None:
        slot, (_, row) = here.slot(step), here.tile(lax.div(step, jnp.int32(here.steps)))
        for part in range(here.parts):
            plgpu.copy_gmem_to_smem(
                refs.weight.at[part, pl.ds(row, plan.columns), here.inputs(step)],
                refs.weights.at[slot, pl.ds(part * plan.columns, plan.columns)],
                refs.full.at[slot],
                collective_axes=peers if plan.shares_weights else None,
            )

    def tokens(step: Any) -> None:
        slot, (token, _) = here.slot(step), here.tile(lax.div(step, jnp.int32(here.steps)))
        plgpu.copy_gmem_to_smem(
            refs.x.at[pl.ds(token, here.height), here.inputs(step)],
            refs.tokens.at[slot, pl.ds(0, here.height)],
            refs.full.at[slot],
            collective_axes=None if plan.shares_weights else peers,
        )

    first = min(plan.slots, here.steps)
    if waits and not read_ahead:
        plgpu.griddepcontrol_wait()

    @pl.loop(0, first)
    def _ahead(step: Any) -> None:
        weights(step)

    if waits and read_ahead:
        plgpu.griddepcontrol_wait()

    @pl.loop(0, total)
    def _step(step: Any) -> None:
        pl.when(step >= plan.slots)(lambda: plgpu.barrier_wait(refs.free.at[here.slot(step)]))
        pl.when(step >= first)(lambda: weights(step))
        tokens(step)

    @pl.loop(jnp.maximum(total - plan.slots, 0), total)  # every release is seen before the end
    def _drain(step: Any) -> None:
        plgpu.barrier_wait(refs.free.at[here.slot(step)])


def _compute(here: _Here, refs: Any, worker: Any, activation: str | None, waits: bool) -> None:
    """A computing warpgroup: 64 tokens by the tile's rows of the weight, turn after turn."""
    plan = here.plan
    if plan.blocks == 2:  # three warpgroups begin with 168 registers a thread, 128 accumulate
        plgpu.set_max_registers(232, action="increase")
    if waits:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
    mine = pl.ds(pl.multiple_of(worker * ROWS, ROWS), ROWS)

    @pl.loop(0, here.turns)
    def _turn(turn: Any) -> None:
        def product(accumulator: Any) -> jax.Array:
            @pl.loop(0, here.steps)
            def _step(index: Any) -> None:
                step = turn * here.steps + index
                slot = here.slot(step)
                plgpu.barrier_wait(refs.full.at[slot])
                tokens, weights = refs.tokens.at[slot, mine], refs.weights.at[slot]
                plgpu.wgmma(accumulator, tokens, weights.transpose((1, 0)))
                plgpu.wgmma_wait(1)  # the step before is done with its slot

                @pl.when(index > 0)
                def _release() -> None:
                    plgpu.barrier_arrive(refs.free.at[here.slot(step - 1)])

            return accumulator[...]

        wide = plgpu.ACC((ROWS, here.parts * plan.columns), jnp.float32)
        value = pl.run_scoped(product, wide)
        plgpu.barrier_arrive(refs.free.at[here.slot((turn + 1) * here.steps - 1)])
        if activation is not None:
            gate, up = value[:, : plan.columns], value[:, plan.columns :]
            value = ACTIVATIONS[activation](gate) * up
        _store(here, refs, worker, value, turn)

    plgpu.wait_smem_to_gmem(0)


def _store(here: _Here, refs: Any, worker: Any, value: jax.Array, turn: Any) -> None:
    """A warpgroup's part of the tile, by way of shared memory, a few columns at a time."""
    plan, (_, chunks, _, chunk) = here.plan, refs.result.shape
    token, row = here.tile(turn)
    for index in range(plan.columns // chunk):
        first, place = index * chunk, index % chunks
        # Of the tile before nothing is under way any more, of this one what has another place.
        plgpu.wait_smem_to_gmem(chunks - 1 if index else 0, wait_read_only=True)
        refs.result[worker, place] = value[:, first : first + chunk].astype(refs.result.dtype)
        plgpu.commit_smem()
        columns = pl.ds(pl.multiple_of(row + first, 8), chunk)

        def put(block: Any, count: int, place: int = place, columns: Any = columns) -> None:
            rows = pl.ds(pl.multiple_of(token + block * ROWS, 8), count)
            source = refs.result.at[block, place, pl.ds(0, count)]
            plgpu.copy_smem_to_gmem(source, refs.out.at[rows, columns])

        if here.height == plan.height:
            put(worker, ROWS)
            continue
        for block in range(plan.blocks):
            count = min(here.height - block * ROWS, ROWS)
            pl.when(worker == block)(partial(put, block, count))
