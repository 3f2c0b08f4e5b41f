"""The second pass of latent attention: rows cut across SMs are put together again.

Outputs of padding tokens are filled with zeros on the way.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool

from pallas_kernels.latent_attention.gpu_problem import LATENT, Problem
from pallas_kernels.ragged_attention.gpu_schedule import BEGAN, BLOCK0, BLOCKS, COUNT, ITEM, TOKEN
from pallas_kernels.ragged_attention.gpu_softmax import MASKED, ROWS, TILE, swizzled

_CHANNELS = 64  # that one block of threads finishes: few, so that many loads fly


def combine_heads(problem: Problem, out: Any, schedule: Any, parts: Any, weights: Any) -> None:
    """Finish `out` (a Ref [tokens, heads, latent]) from parts [parts, latent, heads] and their
    log2 weights [parts, heads].
    """
    named = {
        "out": out,
        "items": schedule.items,
        "work": schedule.work,
        "parts": parts,
        "weights": weights,
    }
    workers, items = schedule.work.shape[0], schedule.items.shape[0]
    shape = (_CHANNELS, problem.heads)

    def latent_combine(*refs: Any) -> None:
        given = SimpleNamespace(**dict(zip(named, refs, strict=False)), line=refs[-1])
        worker = lax.axis_index("worker")
        channels = pl.ds(lax.axis_index("column") * _CHANNELS, _CHANNELS)

        def hold(value: jax.Array) -> None:
            turned = given.line.transpose((1, 0))
            narrow = value.astype(problem.dtype)
            turned[...] = plgpu.layout_cast(narrow, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()

        def send(item: Any) -> None:
            target = given.out.at[given.items[item, TOKEN], :, channels]
            plgpu.copy_smem_to_gmem(given.line, target)

        def load(part: Any) -> tuple[Any, Any]:
            return given.weights.at[part], given.parts.at[part, channels]

        _join(given, worker, shape, 1, 4, load, lambda value, item: (hold(value), send(item)))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        hold(_zeros(shape))

        @pl.loop(0, (items - worker + workers - 1) // workers)
        def _padding(step: Any) -> None:
            item = worker + step * workers
            pl.when(given.items[item, BLOCKS] == 0)(lambda: send(item))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    plgpu.kernel(
        latent_combine,
        scratch_types=[swizzled(problem.heads, _CHANNELS, problem.dtype)],
        grid=(workers, LATENT // _CHANNELS),
        grid_names=("worker", "column"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=problem.interpret,
    )(*named.values())


def combine_tiles(
    problem: Problem,
    out: Any,
    schedule: Any,
    counts: Any,
    parts: Any,
    weights: Any,
    valid: Bool[Array, " tokens"],
) -> None:
    """Finish `out` (a Ref [tokens * heads, latent]) from parts [sides, parts, rows, latent] and
    their log2 weights [sides, parts, rows]; counts [tiles]: the tokens of each.
    """
    named = {
        "out": out,
        "items": schedule.items,
        "work": schedule.work,
        "counts": counts,
        "parts": parts,
        "weights": weights,
        **_padding_of(valid),
    }
    workers, sides = schedule.work.shape[0], max(problem.heads // ROWS, 1)

    def latent_combine(*refs: Any) -> None:
        given = SimpleNamespace(**dict(zip(named, refs, strict=False)), line=refs[-1])
        _combine_tile(problem, given, workers)

    plgpu.kernel(
        latent_combine,
        scratch_types=[swizzled(ROWS, _CHANNELS, problem.dtype)],
        grid=(workers, LATENT // _CHANNELS, sides),
        grid_names=("worker", "column", "side"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=problem.interpret,
    )(*named.values())


def _combine_tile(problem: Problem, given: Any, workers: int) -> None:
    """One block of threads of combine_tiles: some channels of the tile that one worker ended."""
    per_token, shape = min(problem.heads, ROWS), (ROWS, _CHANNELS)
    worker, side = lax.axis_index("worker"), lax.axis_index("side")
    channels = pl.ds(lax.axis_index("column") * _CHANNELS, _CHANNELS)

    def hold(value: jax.Array) -> None:
        given.line[...] = value.astype(problem.dtype)
        plgpu.commit_smem()

    def send(token: Any, ahead: Any) -> None:
        first = pl.multiple_of(token * problem.heads + side * ROWS, 8)
        plgpu.copy_smem_to_gmem(
            given.line.at[pl.ds(ahead, per_token)],
            given.out.at[pl.ds(first, per_token), channels],
        )

    def load(part: Any) -> tuple[Any, Any]:
        return given.weights.at[side, part], given.parts.at[side, part, :, channels]

    def store(value: jax.Array, item: Any) -> None:
        hold(value)

        @pl.loop(0, given.counts[item])
        def _token(index: Any) -> None:
            ahead = pl.multiple_of(index * per_token, 8)
            send(given.items[item, TOKEN] + index, ahead)

    _join(given, worker, shape, 0, 2, load, store)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    hold(_zeros(shape))

    @pl.loop(0, (given.paddings[0] - worker + workers - 1) // workers)
    def _padding(step: Any) -> None:
        send(given.padding[worker + step * workers], 0)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _padding_of(valid: Bool[Array, " tokens"]) -> dict[str, Array]:
    """The padding tokens, in the first places of `padding`, and their number."""
    tokens = valid.shape[0]
    place = jnp.where(valid, tokens, jnp.cumsum(~valid) - 1)
    padding = jnp.zeros(tokens, jnp.int32).at[place].set(jnp.arange(tokens), mode="drop")
    return {"padding": padding, "paddings": (tokens - valid.sum(dtype=jnp.int32))[None]}


def _zeros(shape: tuple[int, int]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE)


def _join(
    refs: Any,
    worker: Any,
    shape: tuple[int, int],
    axis: int,
    at_once: int,
    load: Callable[[Any], tuple[Any, Any]],
    store: Callable[[jax.Array, Any], None],
) -> None:
    """If a row that began earlier ended in this worker's run: store(its result, its item).

    load(part): the weights and the values, of this shape, of one part; the weights lie along axis.
    at_once: parts in flight at a time, for each load takes most of a microsecond.
    """
    along = TILE.reduce(1 - axis)
    item, block = refs.work[worker, ITEM], refs.work[worker, BLOCK0]
    began = refs.work[worker, BEGAN]
    rest = refs.items[item, BLOCKS] - block

    def across(weight: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(weight, shape, [axis])

    def some(index: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        out, top, total = state
        loaded = []
        for lane in range(at_once):
            one = index * at_once + lane
            part = jnp.where(one == 0, 2 * began + 1, 2 * jnp.minimum(began + one, worker))
            weights, values = load(part)
            weight = plgpu.load(weights, layout=along, optimized=False)
            value = plgpu.load(values, layout=TILE, optimized=False)
            loaded.append((weight + jnp.where(one <= worker - began, 0.0, MASKED), value))
        new = top
        for weight, _ in loaded:
            new = jnp.maximum(new, weight)
        fade = jnp.exp2(top - new)
        out, total = out * across(fade), total * fade
        for weight, value in loaded:
            share = jnp.exp2(weight - new)
            out, total = out + across(share) * value.astype(jnp.float32), total + share
        return out, new, total

    @pl.when((block > 0) & (refs.work[worker, COUNT] >= rest))
    def _rows() -> None:
        def per_weight(value: float) -> jax.Array:
            return plgpu.layout_cast(jnp.full((shape[axis],), value, jnp.float32), along)

        steps = (worker - began + at_once) // at_once
        start = (_zeros(shape), per_weight(MASKED), per_weight(0.0))
        out, _, total = lax.fori_loop(0, steps, some, start)
        store(out / across(total), item)
