"""Attention and mixture chain in one launch on Hopper GPUs: what problems it serves, its arrays."""

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
from pallas_kernels.attend_mixture.gpu_words import SendingAttention
from pallas_kernels.expert_mlp.choice import ChoiceProblem
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.layer_chain.gpu_plan import PARTS, Plan
from pallas_kernels.mixture_chain import gpu as mixture_chain
from pallas_kernels.mixture_chain.checks import MixtureProblem, MixtureWeights
from pallas_kernels.mixture_chain.gpu_kernel import launch
from pallas_kernels.mixture_chain.gpu_plan import Facts, make_plan
from pallas_kernels.pages import KVPages, RaggedRows


def unsupported(problem: AttendProblem[MixtureProblem]) -> str | None:
    """Why the Hopper kernel cannot serve this problem; None if it can."""
    chain = problem.chain
    reason = mixture_chain.unsupported(chain) or unsupported_attention(
        problem.attention, problem.context
    )
    if reason is not None:
        return reason
    if chain.inner % (PARTS * HEAD) or chain.model % (PARTS * HEAD) or chain.ffn % HEAD:
        return f"the widths must be multiples of {PARTS * HEAD}, the experts' of {HEAD}"
    return None


def run(
    fused: Float[Array, "1 fused"],
    residual: Float[Array, "1 model"],
    weights: MixtureWeights,
    pages: KVPages,
    rows: RaggedRows,
    state: Int[Array, " state"],
    *,
    attention: AttentionOptions,
    choice: ChoiceProblem,
    eps: float,
    activation: str,
    interpret: Any = None,
    plan: Plan | None = None,
) -> tuple[Array, Array | None, KVPages, Array]:
    """As attend_mixture. interpret: parameters of Mosaic GPU's interpreter, for tests."""
    facts = mixture_chain.facts_of(
        residual, weights, choice=choice, eps=eps, activation=activation, interpret=interpret
    )
    if plan is None:
        plan = make_plan(facts, multiprocessors(), least=LINE)
    one, inputs = attention_of(
        *(fused, pages, rows, attention), blocks=plan.blocks, interpret=bool(interpret)
    )
    one = replace(one, opens_early=True)
    if not interpret:  # where there are no words
        one = SendingAttention.of(one, facts.words("attended"))
    facts = replace(facts, before=one)
    return _run(inputs, residual, weights, pages, state, facts=facts, plan=plan)


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("facts", "plan"))
def _run(
    inputs: dict[str, Array],
    residual: Float[Array, "1 model"],
    weights: MixtureWeights,
    pages: KVPages,
    state: Int[Array, " state"],
    *,
    facts: Facts,
    plan: Plan,
) -> tuple[Array, Array | None, KVPages, Array]:
    one = facts.before
    assert isinstance(one, Attending), "the attention is missing"
    attended = {}
    if facts.interpret:
        attended["attended"] = lax.empty((PARTS, facts.inner // PARTS), facts.dtype)
    refs = written_by(one, pages, facts.dtype, **attended)
    named = {**inputs, **mixture_chain.operands_of(residual, weights, facts), **refs}
    results = mixture_chain.results_of(facts)
    if facts.interpret:  # the interpreter has no barrier of the whole grid: piece by piece
        for some in apart(one):
            launch(replace(facts, before=some), plan, (), {**named, **results})
        facts = replace(facts, before=None)
    handed_on = mixture_chain.launch_all(facts, plan, named, results, state)
    stream, following = mixture_chain.frozen(results)
    return stream, following, pages_of(refs), handed_on
