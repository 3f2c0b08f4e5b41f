"""From one layer's raw QKV product to the next one's for one row, through a mixture of experts.

As attend_chain does for dense layers: attention begins the kernel that goes on with the layer's
products, whose first weight streams meanwhile.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels import mixture_chain
from pallas_kernels.attend_chain.checks import AttendProblem, attention_has_kernel, check
from pallas_kernels.attend_chain.options import AttentionOptions
from pallas_kernels.dispatch import Operation
from pallas_kernels.expert_mlp.choice import ChoiceProblem
from pallas_kernels.mixture_chain import MixtureProblem, MixtureWeights
from pallas_kernels.mixture_chain.checks import check as check_chain, state_size
from pallas_kernels.pages import KVPages, RaggedRows

_OPERATION = Operation(
    name="attend_mixture",
    modules={
        "reference": "pallas_kernels.attend_mixture.reference",
        "gpu": "pallas_kernels.attend_mixture.gpu",
    },
    kernels={"cuda": ("gpu",)},
    fallback="reference",
)


def attend_mixture(
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
    implementation: str | None = None,
) -> tuple[
    Float[Array, "1 model"], Float[Array, "1 following"] | None, KVPages, Int[Array, " state"]
]:
    """mixture_chain of what qkv_attention gives: the residual stream behind this layer, the next
    layer's first product, the pages with the step's key and value, and the state.

    fused: this layer's first product: for each KV head its queries, key and value. attention: its
    options. state: as mixture_chain's, with `inner` numbers for what attention gathers. The other
    arguments are theirs, and so are the errors. What comes of a padding token has no meaning.
    """
    problem = _problem(fused, residual, weights, pages, rows, attention, choice, activation)
    _check_state(problem.chain, state)
    return _OPERATION.choose(problem, implementation).run(
        *(fused, residual, weights, pages, rows, state),
        attention=attention,
        choice=choice,
        eps=eps,
        activation=activation,
    )


def has_kernel(
    fused: Float[Array, "1 fused"],
    residual: Float[Array, "1 model"],
    weights: MixtureWeights,
    pages: KVPages,
    rows: RaggedRows,
    *,
    attention: AttentionOptions,
    choice: ChoiceProblem,
    activation: str,
) -> bool:
    """Whether attend_mixture would run a kernel, and none was asked for by name for its parts:
    where not, attention has one of its own, or none.
    """
    problem = _problem(fused, residual, weights, pages, rows, attention, choice, activation)
    return (
        _OPERATION.has_kernel(problem)
        and attention_has_kernel(fused, pages, rows, attention)
        and mixture_chain.has_kernel(residual, weights, choice, activation)
    )


def _problem(
    fused: Float[Array, "1 fused"],
    residual: Float[Array, "1 model"],
    weights: MixtureWeights,
    pages: KVPages,
    rows: RaggedRows,
    attention: AttentionOptions,
    choice: ChoiceProblem,
    activation: str,
) -> AttendProblem[MixtureProblem]:
    return check(
        *(fused, pages, rows, attention),
        lambda attended: check_chain(attended, residual, weights, choice, activation),
    )


def _check_state(problem: MixtureProblem, state: Int[Array, " state"]) -> None:
    sizes = problem.model, problem.choice.experts, problem.inner
    if state.shape[0] < state_size(*sizes):
        raise ValueError(
            f"state must be of mixture_state{sizes}: at least {state_size(*sizes)} numbers. "
            f"It has {state.shape[0]}."
        )


__all__ = ["AttentionOptions", "attend_mixture", "has_kernel"]
