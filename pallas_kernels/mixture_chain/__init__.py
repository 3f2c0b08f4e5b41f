"""From one layer's attention to the next one's for a single row, through a mixture of experts.

A layer of one row is a stream of weights, as in layer_chain; but most of them are known only when
the router has chosen. One kernel keeps the stream going, but for that choice.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Operation
from pallas_kernels.expert_mlp.choice import ChoiceProblem
from pallas_kernels.layer_chain.checks import ACTIVATIONS
from pallas_kernels.mixture_chain.checks import (
    MixtureProblem,
    MixtureWeights,
    check,
    problem_of,
    state_size,
)

_OPERATION = Operation(
    name="mixture_chain",
    modules={
        "reference": "pallas_kernels.mixture_chain.reference",
        "gpu": "pallas_kernels.mixture_chain.gpu",
    },
    kernels={"cuda": ("gpu",)},
    fallback="reference",
)


def mixture_state(model: int, experts: int, inner: int = 0) -> Int[Array, " state"]:
    """What the calls of one step hand on to each other; made at its beginning.

    model: width of the residual stream; experts: the most that a layer has; inner: the most that
    attention gathers in a layer, where calls of attend_mixture are among them.
    """
    return jnp.zeros((state_size(model, experts, inner),), jnp.int32)


def mixture_chain(
    attended: Float[Array, "1 inner"],
    residual: Float[Array, "1 model"],
    weights: MixtureWeights,
    state: Int[Array, " state"],
    *,
    choice: ChoiceProblem,
    eps: float,
    activation: str,
    implementation: str | None = None,
) -> tuple[Float[Array, "1 model"], Float[Array, "1 fused"] | None, Int[Array, " state"]]:
    """The residual stream behind this layer, the next layer's first product, and the state.

    attended: what this layer's attention has gathered. With norm(x, w) = (x / rms(x)) * w, rounded
    before the product with w:

        x = residual + attended @ out.T
        experts, shares = choose(norm(x, mlp_norm) @ router.T)
        x = x + expert_mlp(norm(x, mlp_norm), experts, shares, gate_up, down, shared)
        fused = norm(x, next_norm) @ following.T

    Products accumulate in float32 and are rounded to the arrays' dtype, but for the router's. fused
    is None where the weights have no `following`. choice: of one token. eps: of the norms.
    activation: "silu" or "gelu_tanh". state: from `mixture_state` or the step's call before; calls
    that share it must not overlap.

    implementation: "reference" or a kernel's name; None chooses by platform. Raises ValueError for
    shapes that do not fit together, UnsupportedShape for a named implementation that cannot serve.
    """
    problem = check(attended, residual, weights, choice, activation)
    needed = state_size(problem.model, choice.experts)
    if state.shape[0] < needed:
        raise ValueError(
            f"state must be of mixture_state({problem.model}, {choice.experts}): at least {needed} "
            f"numbers. It has {state.shape[0]}."
        )
    chosen = _OPERATION.choose(problem, implementation)
    options = {"choice": choice, "eps": eps, "activation": activation}
    return chosen.run(attended, residual, weights, state, **options)


def has_kernel(
    residual: Float[Array, "tokens model"],
    weights: MixtureWeights,
    choice: ChoiceProblem,
    activation: str,
) -> bool:
    """Whether mixture_chain would run a kernel; where not, a model computes its own way."""
    dtypes = {jnp.dtype(leaf.dtype) for leaf in jax.tree.leaves((residual, weights))}
    if len(dtypes) > 1 or activation not in ACTIVATIONS:
        return False
    return _OPERATION.has_kernel(problem_of(residual, weights, choice, activation))


__all__ = ["MixtureProblem", "MixtureWeights", "has_kernel", "mixture_chain", "mixture_state"]
