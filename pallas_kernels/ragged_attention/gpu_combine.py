"""The second pass of paged decode: rows cut across workers are put together again.

Partial results are stored beside their log2 weights, one weight per element, so that everything
here is elementwise; both as the sum of two numbers of the narrow type, which is exact enough. Rows
of padding tokens are filled with zeros on the way.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_attention.gpu_problem import Problem
from pallas_kernels.ragged_attention.gpu_schedule import (
    BEGAN,
    BLOCK0,
    BLOCKS,
    COUNT,
    HEAD,
    ITEM,
    TOKEN,
)
from pallas_kernels.ragged_attention.gpu_softmax import LOG2E, MASKED

PARTS = ("result, high", "result, low", "weight, high", "weight, low")
_AT_ONCE = 12  # partial results in flight at a time: each load takes most of a microsecond


def _vector(shape: tuple[int, int]) -> int:
    """Elements of one load of a thread: the widest that 128 threads share evenly."""
    each = shape[0] * shape[1] // 128
    return next(size for size in (4, 2, 1) if each % size == 0)


def _columns(problem: Problem) -> int:
    """Columns of the result that one block of threads finishes: few, so that many loads fly."""
    return 32 if problem.head_dim % 32 == 0 else 16


def combine(
    problem: Problem,
    out: Any,
    schedule: Any,
    parts: Any,
    wide_sinks: Any | None,
) -> None:
    """Finish `out` (a Ref [tokens, heads, head]) from parts [parts, 4, group, head]."""
    columns = _columns(problem)
    named = {
        "out": out,
        "items": schedule.items,
        "work": schedule.work,
        "parts": parts,
    }
    if wide_sinks is not None:
        named["wide_sinks"] = wide_sinks
    workers = schedule.work.shape[0]

    def body(*refs: Any) -> None:
        given = SimpleNamespace(**dict(zip(named, refs, strict=False)), line=refs[-1])
        _combine(problem, given, workers)

    plgpu.kernel(
        body,
        scratch_types=[plgpu.SMEM((problem.padded_group, columns), problem.dtype)],
        grid=(workers, problem.head_dim // columns),
        grid_names=("worker", "column"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=problem.interpret,
    )(*named.values())


def _combine(problem: Problem, refs: Any, workers: int) -> None:
    """One worker's part of the second pass: the row that began earlier and ended in its run."""
    worker = lax.axis_index("worker")
    group, shape = problem.group, (problem.padded_group, _columns(problem))
    across = pl.ds(lax.axis_index("column") * shape[1], shape[1])
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=_vector(shape))
    item, head = refs.work[worker, ITEM], refs.work[worker, HEAD]
    block, began = refs.work[worker, BLOCK0], refs.work[worker, BEGAN]
    rest = refs.items[item, BLOCKS] - block

    def load(source: Any) -> jax.Array:
        return plgpu.load(source, layout=layout, optimized=False).astype(jnp.float32)

    def store(value: jax.Array, token: Any, kv_head: Any) -> None:
        refs.line[...] = value.astype(problem.dtype)
        plgpu.commit_smem()
        mine = pl.ds(kv_head * group, group)
        plgpu.copy_smem_to_gmem(refs.line.at[pl.ds(0, group)], refs.out.at[token, mine, across])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when((block > 0) & (refs.work[worker, COUNT] >= rest))
    def _join() -> None:
        count = worker - began + 1

        def some(index: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            out, top, total = state
            loaded = []
            for lane in range(_AT_ONCE):
                one = index * _AT_ONCE + lane
                part = jnp.where(one == 0, 2 * began + 1, 2 * jnp.minimum(began + one, worker))
                high, low, weight, more = (
                    load(refs.parts.at[part, i, :, across]) for i in range(len(PARTS))
                )
                value, weight = high + low, weight + more
                loaded.append((weight + jnp.where(one < count, 0.0, MASKED), value))
            new = top
            for weight, _ in loaded:
                new = jnp.maximum(new, weight)
            fade = jnp.exp2(top - new)
            out, total = out * fade, total * fade
            for weight, value in loaded:
                share = jnp.exp2(weight - new)
                out, total = out + share * value, total + share
            return out, new, total

        def full(value: float) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        top, total = full(MASKED), full(0.0)
        if problem.sinks:
            top, total = load(refs.wide_sinks.at[head, :, across]) * LOG2E, full(1.0)
        steps = (count + _AT_ONCE - 1) // _AT_ONCE
        out, _, total = lax.fori_loop(0, steps, some, (full(0.0), top, total))
        store(out / total, refs.items[item, TOKEN], head)

    nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    items = refs.items.shape[0]

    @pl.loop(0, (items - worker + workers - 1) // workers)
    def _padding(step: Any) -> None:
        padding = worker + step * workers

        @pl.when(refs.items[padding, BLOCKS] == 0)
        def _zero() -> None:
            for kv_head in range(problem.kv_heads):
                store(nothing, refs.items[padding, TOKEN], kv_head)
