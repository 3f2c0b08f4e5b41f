"""Root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxgen_models.layers.leaf import Leaf


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis; statistics in float32, the product in x's dtype."""

    def __init__(self, weight: Leaf, eps: float) -> None:
        self.weight = nnx.Param(weight)
        self.eps = eps

    def __call__(self, x: Float[Array, "... model"]) -> Float[Array, "... model"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * scale).astype(x.dtype) * self.weight[...]
