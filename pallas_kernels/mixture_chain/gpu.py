"""The mixture chain on Hopper GPUs: which problems the kernel serves, and its arrays."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp.choice import ChoiceProblem
from pallas_kernels.hopper import multiprocessors, wrong_device
from pallas_kernels.layer_chain.gpu import fold
from pallas_kernels.layer_chain.gpu_plan import PARTS, Plan
from pallas_kernels.mixture_chain.checks import MixtureProblem, MixtureWeights
from pallas_kernels.mixture_chain.gpu_kernel import launch
from pallas_kernels.mixture_chain.gpu_plan import PHASES, Facts, make_plan

_MOST_EXPERTS = 256  # whose scores a thread group holds


def unsupported(problem: MixtureProblem) -> str | None:
    """Why the Hopper kernel cannot serve this problem; None if it can."""
    wrong = wrong_device()
    if wrong is not None:
        return wrong
    if problem.dtype != jnp.bfloat16:
        return "it computes in bfloat16 only"
    if problem.rows != 1:
        return "it serves a single row"
    return _unsupported_sizes(problem) or _unsupported_choice(problem)


def _unsupported_sizes(problem: MixtureProblem) -> str | None:
    if problem.inner % 512 or problem.model % 512 or problem.ffn % 64:
        return "the widths must be multiples of 512, the experts' of 64"
    if problem.shared_ffn % problem.ffn:
        return "the shared expert is not as wide as some experts together"
    if problem.choice.top_k + problem.shared_ffn // problem.ffn > PARTS:
        return f"a token visits more than {PARTS} experts, shared ones included"
    if problem.fused is not None and problem.fused % 16:
        return "the width of the next product must be a multiple of 16"
    return None


def _unsupported_choice(problem: MixtureProblem) -> str | None:
    choice = problem.choice
    if choice.experts % 64 or choice.experts > _MOST_EXPERTS:
        return f"the number of experts must be a multiple of 64 up to {_MOST_EXPERTS}"
    if choice.groups > 1:
        return "experts are chosen by groups"
    return None


def run(
    attended: Float[Array, "1 inner"],
    residual: Float[Array, "1 model"],
    weights: MixtureWeights,
    state: Int[Array, " state"],
    *,
    choice: ChoiceProblem,
    eps: float,
    activation: str,
    interpret: Any = None,
    plan: Plan | None = None,
) -> tuple[Float[Array, "1 model"], Float[Array, "1 fused"] | None, Int[Array, " state"]]:
    """As mixture_chain. interpret: parameters of Mosaic GPU's interpreter, for tests."""
    facts = facts_of(
        residual, weights, choice=choice, eps=eps, activation=activation, interpret=interpret
    )
    if plan is None:
        # One block of threads for each: all of them are resident at a time.
        plan = make_plan(facts, multiprocessors())
    return _run(attended, residual, weights, state, facts=facts, plan=plan)


def facts_of(
    residual: Float[Array, "1 model"],
    weights: MixtureWeights,
    *,
    choice: ChoiceProblem,
    eps: float,
    activation: str,
    interpret: Any,
) -> Facts:
    """What the kernel of these weights is told."""
    return Facts(
        inner=weights.out.shape[1],
        model=residual.shape[1],
        ffn=weights.down.shape[2],
        shared=0 if weights.shared_down is None else weights.shared_down.shape[1],
        fused=None if weights.following is None else weights.following.shape[0],
        choice=choice,
        dtype=residual.dtype,
        eps=eps,
        activation=activation,
        interpret=interpret,
    )


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("facts", "plan"))
def _run(
    attended: Float[Array, "1 inner"],
    residual: Float[Array, "1 model"],
    weights: MixtureWeights,
    state: Int[Array, " state"],
    *,
    facts: Facts,
    plan: Plan,
) -> tuple[Float[Array, "1 model"], Float[Array, "1 fused"] | None, Int[Array, " state"]]:
    named = {"attended": fold(attended), **operands_of(residual, weights, facts)}
    results = results_of(facts)
    handed_on = launch_all(facts, plan, named, results, state)
    return (*frozen(results), handed_on)


def operands_of(
    residual: Float[Array, "1 model"], weights: MixtureWeights, facts: Facts
) -> dict[str, Array]:
    """What the kernel reads beside its first product's input, by name, folded."""
    named = {"residual": fold(residual), "down": weights.down}
    for name in ("out", "router", "gate_up", "shared_gate_up", "following"):
        if getattr(weights, name) is not None:
            named[name] = fold(getattr(weights, name))
    for name in ("mlp_norm", "next_norm"):
        if getattr(weights, name) is not None:
            named[name] = getattr(weights, name).reshape(PARTS, -1)
    if weights.shared_down is not None:
        named["shared_down"] = weights.shared_down
    if weights.ahead is not None and not facts.interpret:
        named["ahead"] = weights.ahead.reshape(-1)
    return named


def results_of(facts: Facts) -> dict[str, Any]:
    """Room for what every phase gives, by name."""
    shapes = {
        "middle": ((PARTS, facts.model // PARTS), facts.dtype),
        "hidden": ((PARTS, facts.ffn), facts.dtype),
        "stream": ((PARTS, facts.model // PARTS), facts.dtype),
    }
    if facts.fused is not None:
        shapes["fused"] = ((1, facts.fused), facts.dtype)
    if facts.interpret:  # where there are no words, as there is no waiting
        shapes["logits"] = ((facts.choice.experts,), jnp.float32)
    return {name: jax.new_ref(lax.empty(*made)) for name, made in shapes.items()}


def launch_all(
    facts: Facts,
    plan: Plan,
    named: dict[str, Any],
    results: dict[str, Any],
    state: Int[Array, " state"],
) -> Int[Array, " state"]:
    """Run all phases; the state that is handed on."""
    if facts.interpret:  # the interpreter has no barrier of the whole grid: phase by phase
        for phase in PHASES:
            launch(facts, plan, (phase,), {**named, **results})
        return state
    meeting = jax.new_ref(state)
    launch(facts, plan, PHASES, {**named, **results, "state": meeting})
    return jax.freeze(meeting)


def frozen(
    results: dict[str, Any],
) -> tuple[Float[Array, "1 model"], Float[Array, "1 fused"] | None]:
    """The residual stream and the next layer's first product."""
    found = {name: jax.freeze(ref) for name, ref in results.items()}
    return found["stream"].reshape(1, -1), found.get("fused")
