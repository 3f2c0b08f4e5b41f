"""Products with weights stored [out, in], as checkpoints hold them.

A weight is one of the model's own, an argument of the compiled step: kernels may read it early.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.product import gated_product, product

# Hugging Face's names of the activations that a gated product applies itself.
_GATES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def project(x: Float[Array, "tokens model"], weight: Float[Array, "out in"]) -> Float[Array, "..."]:
    """x @ weight.T in x's dtype, accumulated in float32."""
    return product(x, weight, weight_is_input=True)


def project_to_float32(
    x: Float[Array, "tokens model"], weight: Float[Array, "out in"]
) -> Float[Array, "tokens out"]:
    """As `project`, keeping the float32 accumulator: logits are never rounded to a narrow type."""
    return product(x, weight, out_dtype=jnp.float32, weight_is_input=True)


def project_gated(
    x: Float[Array, "tokens model"], weight: Float[Array, "2 out in"], activation: str
) -> Float[Array, "tokens out"]:
    """activation(x @ weight[0].T) * (x @ weight[1].T); activation: by its Hugging Face name."""
    return gated_product(x, weight, activation=_GATES[activation], weight_is_input=True)
