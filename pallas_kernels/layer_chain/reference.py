"""The chain's meaning in plain JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layer_chain.checks import ChainProblem, ChainWeights, Leaf

ACTIVATE = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


def unsupported(problem: ChainProblem) -> str | None:
    """It serves everything."""
    del problem
    return None


def run(
    attended: Float[Array, "rows inner"],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    state: Int[Array, "1"],
    *,
    eps: float,
    activation: str,
) -> tuple[Float[Array, "rows model"], Float[Array, "rows fused"] | None, Int[Array, "1"]]:
    """As layer_chain."""
    x = residual + product(attended, weights.out)
    _, ffn, model = weights.gate_up.shape
    hidden = product(normed(x, weights.mlp_norm, eps), weights.gate_up.reshape(2 * ffn, model))
    gate, up = hidden[:, :ffn], hidden[:, ffn:]
    x = x + product(ACTIVATE[activation](gate) * up, weights.down)
    if weights.qkv is None:
        return x, None, state
    fused = product(normed(x, weights.next_norm, eps), weights.qkv)
    return x, (fused if weights.qkv_bias is None else fused + weights.qkv_bias), state


def normed(x: Float[Array, "rows model"], weight: Leaf, eps: float) -> Float[Array, "rows model"]:
    """(x / rms(x)) * weight, rounded before the product."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def product(x: Float[Array, "rows inner"], weight: Leaf) -> Float[Array, "rows outer"]:
    """x @ weight.T, accumulated in float32, in x's dtype."""
    return wide_product(x, weight).astype(x.dtype)


def wide_product(x: Float[Array, "rows inner"], weight: Leaf) -> Float[Array, "rows outer"]:
    """The same in float32."""
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
