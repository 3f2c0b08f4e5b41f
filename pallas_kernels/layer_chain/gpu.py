"""The chain on Hopper GPUs: which problems the kernel serves, and its arrays."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import multiprocessors, wrong_device
from pallas_kernels.layer_chain.checks import ChainProblem, ChainWeights
from pallas_kernels.layer_chain.gpu_kernel import launch
from pallas_kernels.layer_chain.gpu_plan import PARTS, Plan, Problem, Stage, make_plan

MOST_ROWS = 8
_NORMED = 88 * 1024  # bytes of a norm's input that leave four slots for weights


def unsupported(problem: ChainProblem) -> str | None:
    """Why the Hopper kernel cannot serve this problem; None if it can."""
    wrong = wrong_device()
    if wrong is not None:
        return wrong
    if problem.dtype != jnp.bfloat16:
        return "it computes in bfloat16 only"
    if problem.rows > MOST_ROWS:
        return f"it serves up to {MOST_ROWS} rows"
    if any(each % 512 for each in (problem.inner, problem.model, problem.ffn)):
        return "the widths of the products' inputs must be multiples of 512"
    if problem.rows * problem.model * 2 > _NORMED:
        return "a norm's input leaves too little shared memory for weights"
    if problem.fused is not None and problem.fused % 128:
        return "the width of the fused QKV must be a multiple of 128"
    return None


def run(
    attended: Float[Array, "rows inner"],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    state: Int[Array, "1"],
    *,
    eps: float,
    activation: str,
    interpret: Any = None,
    plan: Plan | None = None,
) -> tuple[Float[Array, "rows model"], Float[Array, "rows fused"] | None, Int[Array, "1"]]:
    """As layer_chain. interpret: parameters of Mosaic GPU's interpreter, for tests."""
    stages = stages_of(attended.shape[1], residual.shape[1], weights)
    problem = Problem(attended.shape[0], stages, attended.dtype, eps, activation, interpret)
    if plan is None:
        # One block of threads for each: all of them are resident at a time.
        plan = make_plan(problem.rows, stages, multiprocessors())
    return _run(attended, residual, weights, state, problem=problem, plan=plan)


def stages_of(inner: int, model: int, weights: ChainWeights) -> tuple[Stage, ...]:
    """The products of a layer, with these widths of the first one's input and output."""
    ffn = weights.gate_up.shape[1]
    stages = (
        Stage("attended", "out", "middle", inner, model, addend="residual"),
        Stage("middle", "gate_up", "hidden", model, ffn, gated=True, norm="mlp_norm"),
        Stage("hidden", "down", "stream", ffn, model, addend="middle"),
    )
    if weights.qkv is None:
        return stages
    last = Stage("stream", "qkv", "fused", model, weights.qkv.shape[0], norm="next_norm")
    if weights.qkv_bias is not None:
        last = replace(last, addend="qkv_bias", bias=True)
    return (*stages, last)


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("problem", "plan"))
def _run(
    attended: Float[Array, "rows inner"],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    state: Int[Array, "1"],
    *,
    problem: Problem,
    plan: Plan,
) -> tuple[Float[Array, "rows model"], Float[Array, "rows fused"] | None, Int[Array, "1"]]:
    named = {"attended": fold(attended), **operands_of(residual, weights, problem)}
    results = results_of(problem)
    if problem.interpret:  # the interpreter has no barrier of the whole grid: stage by stage
        for stage in problem.stages:
            launch(replace(problem, stages=(stage,)), plan, {**named, **results})
        handed_on = state
    else:
        meeting = jax.new_ref(state)
        launch(problem, plan, {**named, **results, "state": meeting})
        handed_on = jax.freeze(meeting)
    stream, fused = frozen(problem, results)
    return stream, fused, handed_on


def operands_of(
    residual: Float[Array, "rows model"], weights: ChainWeights, problem: Problem
) -> dict[str, Array]:
    """What the products read beside the first one's input, by the stages' names, folded."""
    named = {"residual": fold(residual)}
    for name in ("out", "gate_up", "down", "qkv"):
        weight = getattr(weights, name)
        if weight is not None:
            named[name] = fold(weight)
    for name in ("mlp_norm", "next_norm", "qkv_bias"):
        vector = getattr(weights, name)
        if vector is not None:
            named[name] = vector.reshape(PARTS, -1)
    if weights.ahead is not None and not problem.interpret:
        named["ahead"] = weights.ahead.reshape(-1)
    return named


def results_of(problem: Problem) -> dict[str, Any]:
    """Room for what every stage gives, folded, by name."""
    return {
        stage.result: jax.new_ref(
            lax.empty((problem.rows * PARTS, stage.outer // PARTS), problem.dtype)
        )
        for stage in problem.stages
    }


def frozen(
    problem: Problem, results: dict[str, Any]
) -> tuple[Float[Array, "rows model"], Float[Array, "rows fused"] | None]:
    """The residual stream and the next layer's fused QKV."""
    found = {name: jax.freeze(ref).reshape(problem.rows, -1) for name, ref in results.items()}
    return found["stream"], found.get("fused")


def fold(array: Float[Array, "... out inner"]) -> Float[Array, "... folded part"]:
    """The same bytes with PARTS rows for each row."""
    *outer, rows, inner = array.shape
    return array.reshape(*outer, rows * PARTS, inner // PARTS)
