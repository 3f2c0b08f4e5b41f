"""Attention and chain in one launch on Hopper GPUs: which problems it serves, and its arrays."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attend_chain.checks import AttendProblem
from pallas_kernels.attend_chain.gpu_arrays import (
    apart,
    attention_of,
    pages_of,
    unsupported as unsupported_attention,
    written_by,
)
from pallas_kernels.attend_chain.gpu_attend import HEAD, LINE, Attending
from pallas_kernels.attend_chain.options import AttentionOptions
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.layer_chain import gpu as layer_chain
from pallas_kernels.layer_chain.checks import ChainProblem, ChainWeights
from pallas_kernels.layer_chain.gpu_kernel import launch
from pallas_kernels.layer_chain.gpu_plan import PARTS, Plan, Problem, make_plan
from pallas_kernels.pages import KVPages, RaggedRows


def unsupported(problem: AttendProblem[ChainProblem]) -> str | None:
    """Why the Hopper kernel cannot serve this problem; None if it can."""
    chain = problem.chain
    reason = layer_chain.unsupported(chain) or unsupported_attention(
        problem.attention, problem.context
    )
    if reason is not None:
        return reason
    if any(each % (PARTS * HEAD) for each in (chain.inner, chain.model, chain.ffn)):
        return f"the widths of the products' inputs must be multiples of {PARTS * HEAD}"
    return None


def run(
    fused: Float[Array, "rows fused"],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    pages: KVPages,
    rows: RaggedRows,
    state: Int[Array, "1"],
    *,
    attention: AttentionOptions,
    eps: float,
    activation: str,
    interpret: Any = None,
    plan: Plan | None = None,
) -> tuple[Array, Array | None, KVPages, Array]:
    """As attend_chain. interpret: parameters of Mosaic GPU's interpreter, for tests."""
    stages = layer_chain.stages_of(weights.out.shape[1], residual.shape[1], weights)
    if plan is None:
        plan = make_plan(1, stages, multiprocessors(), reserved=LINE)
    attending, inputs = attention_of(
        *(fused, pages, rows, attention), blocks=plan.blocks, interpret=bool(interpret)
    )
    problem = Problem(1, stages, fused.dtype, eps, activation, interpret, attending)
    return _run(inputs, residual, weights, pages, state, problem=problem, plan=plan)


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("problem", "plan"))
def _run(
    inputs: dict[str, Array],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    pages: KVPages,
    state: Int[Array, "1"],
    *,
    problem: Problem,
    plan: Plan,
) -> tuple[Array, Array | None, KVPages, Array]:
    one, first = problem.before, problem.stages[0]
    assert isinstance(one, Attending), "the attention is missing"
    attended = lax.empty((problem.rows * PARTS, first.inner // PARTS), problem.dtype)
    refs = written_by(one, pages, problem.dtype, attended=attended)
    named = {**inputs, **layer_chain.operands_of(residual, weights, problem), **refs}
    results = layer_chain.results_of(problem)
    if problem.interpret:  # the interpreter has no barrier of the whole grid: stage by stage
        for some in apart(one):
            launch(replace(problem, stages=(), before=some), plan, {**named, **results})
        for stage in problem.stages:
            alone = replace(problem, stages=(stage,), before=None)
            launch(alone, plan, {**named, **results})
        handed_on = state
    else:
        meeting = jax.new_ref(state)
        launch(problem, plan, {**named, **results, "state": meeting})
        handed_on = jax.freeze(meeting)
    stream, fused = layer_chain.frozen(problem, results)
    return stream, fused, pages_of(refs), handed_on
