"""The mixture chain's meaning in plain JAX."""

from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp import Gate, SharedExpert, expert_mlp
from pallas_kernels.expert_mlp.choice import ChoiceProblem, choose
from pallas_kernels.layer_chain.reference import ACTIVATE, normed, product, wide_product
from pallas_kernels.mixture_chain.checks import MixtureProblem, MixtureWeights


def unsupported(problem: MixtureProblem) -> str | None:
    """It serves everything."""
    del problem
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
) -> tuple[Float[Array, "1 model"], Float[Array, "1 fused"] | None, Int[Array, " state"]]:
    """As mixture_chain."""
    x = residual + product(attended, weights.out)
    tokens = normed(x, weights.mlp_norm, eps)
    logits = wide_product(tokens, weights.router)
    experts, shares = choose(logits, None, problem=choice, implementation="portable")
    shared = None
    if weights.shared_gate_up is not None:
        shared = SharedExpert(weights.shared_gate_up, weights.shared_down)
    x = x + expert_mlp(
        tokens,
        experts,
        shares,
        weights.gate_up,
        weights.down,
        gate=_gates(activation),
        shared=shared,
        implementation="reference",
    )
    if weights.following is None:
        return x, None, state
    return x, product(normed(x, weights.next_norm, eps), weights.following), state


def _gates(activation: str) -> Gate:
    return lambda gate, up: ACTIVATE[activation](gate) * up
