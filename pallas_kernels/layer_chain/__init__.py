"""From one layer's attention to the next one's, for a few rows, as one operation.

At 1 to 8 rows a decoder layer is a stream of weights: its products, norms and activation depend on
each other only through a few kilobytes. One kernel can keep the stream going throughout.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Operation
from pallas_kernels.layer_chain.checks import (
    ACTIVATIONS,
    ChainProblem,
    ChainWeights,
    check,
    problem_of,
)

_OPERATION = Operation(
    name="layer_chain",
    modules={
        "reference": "pallas_kernels.layer_chain.reference",
        "gpu": "pallas_kernels.layer_chain.gpu",
    },
    kernels={"cuda": ("gpu",)},
    fallback="reference",
)


def chain_state() -> Int[Array, "1"]:
    """What the calls of one step hand on to each other; made at its beginning."""
    return jnp.zeros((1,), jnp.int32)


def layer_chain(
    attended: Float[Array, "rows inner"],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    state: Int[Array, "1"],
    *,
    eps: float,
    activation: str,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows model"], Float[Array, "rows fused"] | None, Int[Array, "1"]]:
    """The residual stream behind this layer, the next layer's fused QKV, and the state.

    attended: what this layer's attention has gathered, inner = heads * head. With norm(x, w) =
    (x / rms(x)) * w, rounded before the product with w:

        x = residual + attended @ out.T
        gate, up = norm(x, mlp_norm) @ gate_up.T
        x = x + (activation(gate) * up) @ down.T
        fused = norm(x, next_norm) @ qkv.T + qkv_bias

    Products accumulate in float32 and are rounded to the arrays' dtype. fused is None where the
    weights have no qkv. eps: of the norms. activation: "silu" or "gelu_tanh". state: from
    `chain_state` or the step's call before; calls that share it must not overlap.

    implementation: "reference" or a kernel's name; None chooses by platform. Raises ValueError for
    shapes that do not fit together, UnsupportedShape for a named implementation that cannot serve.
    """
    problem = check(attended, residual, weights, activation)
    chosen = _OPERATION.choose(problem, implementation)
    return chosen.run(attended, residual, weights, state, eps=eps, activation=activation)


def has_kernel(
    residual: Float[Array, "rows model"], weights: ChainWeights, activation: str
) -> bool:
    """Whether layer_chain would run a kernel; where not, a model computes its own way."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((residual, weights))}
    if len(dtypes) > 1 or activation not in ACTIVATIONS:
        return False
    return _OPERATION.has_kernel(problem_of(residual, weights, activation))


__all__ = ["ChainProblem", "ChainWeights", "chain_state", "has_kernel", "layer_chain"]
