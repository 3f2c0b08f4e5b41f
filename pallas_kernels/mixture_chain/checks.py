"""What every implementation may rely on: the weights fit together, or ValueError says what not."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass
from jaxtyping import Array, Float

from pallas_kernels.expert_mlp.choice import ChoiceProblem
from pallas_kernels.layer_chain.checks import Leaf, check_fit

HEAD = 64  # of a state: what lies before its words


def state_size(model: int, experts: int, inner: int = 0) -> int:
    """Numbers of a state: a word for each of two streams' places, two for each expert's score, and
    one for each number that attention gathers where it begins the kernel.
    """
    return HEAD + 2 * model + 2 * experts + inner


@register_dataclass
@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """From one layer's attention to the next one's, all of one dtype.

    out [model, inner], mlp_norm [model], router [experts, model], gate_up [experts, 2, ffn, model],
    down [experts, model, ffn]; where every token visits a shared expert too shared_gate_up
    [2, shared_ffn, model] and shared_down [model, shared_ffn]; and of the next layer next_norm
    [model] and following [fused, model], None after the last layer. ahead: any weight that is read
    soon after, of which some may be brought near; the results are the same without it.
    """

    out: Leaf
    mlp_norm: Leaf
    router: Leaf
    gate_up: Leaf
    down: Leaf
    shared_gate_up: Leaf = None
    shared_down: Leaf = None
    next_norm: Leaf = None
    following: Leaf = None
    ahead: Leaf = None


@dataclass(frozen=True, slots=True)
class MixtureProblem:
    """The static facts of one call, by which an implementation says whether it can serve."""

    rows: int
    inner: int
    model: int
    ffn: int
    shared_ffn: int
    fused: int | None
    choice: ChoiceProblem
    activation: str
    dtype: np.dtype

    def __str__(self) -> str:
        return (
            f"{self.inner} -> {self.model}, {self.choice} of {self.ffn}, {self.shared_ffn} shared, "
            f"-> {self.fused}, {self.activation}, {self.dtype}"
        )


def check(
    attended: Float[Array, "1 inner"],
    residual: Float[Array, "1 model"],
    weights: MixtureWeights,
    choice: ChoiceProblem,
    activation: str,
) -> MixtureProblem:
    """The problem, or ValueError naming the argument, what was expected and what came."""
    problem = problem_of(residual, weights, choice, activation)
    model, experts, ffn = problem.model, choice.experts, problem.ffn
    for one, other in (("next_norm", "following"), ("shared_gate_up", "shared_down")):
        if (getattr(weights, one) is None) != (getattr(weights, other) is None):
            raise ValueError(f"{one} and {other} must be given together, or neither.")
    expected = {
        "attended": (attended, (choice.tokens, problem.inner)),
        "residual": (residual, (choice.tokens, model)),
        "out": (weights.out, (model, problem.inner)),
        "mlp_norm": (weights.mlp_norm, (model,)),
        "router": (weights.router, (experts, model)),
        "gate_up": (weights.gate_up, (experts, 2, ffn, model)),
        "down": (weights.down, (experts, model, ffn)),
        "shared_gate_up": (weights.shared_gate_up, (2, problem.shared_ffn, model)),
        "shared_down": (weights.shared_down, (model, problem.shared_ffn)),
        "next_norm": (weights.next_norm, (model,)),
        "following": (weights.following, (problem.fused, model)),
    }
    check_fit(expected, (attended, residual, weights), activation)
    return problem


def problem_of(
    residual: Float[Array, "tokens model"],
    weights: MixtureWeights,
    choice: ChoiceProblem,
    activation: str,
) -> MixtureProblem:
    """The static facts, of arguments that fit together."""
    return MixtureProblem(
        rows=residual.shape[0],
        inner=weights.out.shape[1],
        model=residual.shape[1],
        ffn=weights.down.shape[2],
        shared_ffn=0 if weights.shared_down is None else weights.shared_down.shape[1],
        fused=None if weights.following is None else weights.following.shape[0],
        choice=choice,
        activation=activation,
        dtype=jnp.dtype(residual.dtype),
    )
