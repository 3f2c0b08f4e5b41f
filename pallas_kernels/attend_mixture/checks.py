"""The problem of attention with the mixture chain behind it: that of both, and how long contexts
may be.
"""

from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels.attend_chain.checks import attention_problem
from pallas_kernels.expert_mlp.choice import ChoiceProblem
from pallas_kernels.mixture_chain.checks import (
    MixtureProblem,
    MixtureWeights,
    check as check_chain,
    state_size,
)
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.qkv_attention.checks import QKVProblem
from pallas_kernels.rope_write.heads import HeadNorms, Rotation


@dataclass(frozen=True, slots=True)
class AttendMixtureProblem:
    """The static facts of one call. context: the most tokens that a row's block table holds."""

    chain: MixtureProblem
    attention: QKVProblem
    context: int

    def __str__(self) -> str:
        return f"{self.attention}, contexts of up to {self.context}; {self.chain}"


def check(
    fused: Float[Array, "1 fused"],
    residual: Float[Array, "1 model"],
    weights: MixtureWeights,
    pages: KVPages,
    rows: RaggedRows,
    *,
    choice: ChoiceProblem,
    activation: str,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
) -> AttendMixtureProblem:
    """The problem, or ValueError naming the argument, what was expected and what came."""
    attention, attended = attention_problem(
        fused,
        pages,
        rows,
        rotation=rotation,
        norms=norms,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    return AttendMixtureProblem(
        chain=check_chain(attended, residual, weights, choice, activation),
        attention=attention,
        context=rows.block_table.shape[1] * pages.page_size,
    )


def check_state(problem: AttendMixtureProblem, state: Int[Array, " state"]) -> None:
    """ValueError if it is too small."""
    sizes = problem.chain.model, problem.chain.choice.experts, problem.chain.inner
    if state.shape[0] < state_size(*sizes):
        raise ValueError(
            f"state must be of mixture_state{sizes}: at least {state_size(*sizes)} numbers. "
            f"It has {state.shape[0]}."
        )
