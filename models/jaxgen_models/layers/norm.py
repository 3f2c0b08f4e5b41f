"""Root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467)."""

from collections.abc import Mapping
from typing import Any

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

    @classmethod
    def of(cls, weights: Mapping[str, Any], name: str, eps: float) -> "RMSNorm":
        """The norm whose weight has this name."""
        return cls(weights[name], eps)

    def __call__(self, x: Float[Array, "... model"]) -> Float[Array, "... model"]:
        return self.normalised(x).astype(x.dtype) * self.weight[...]

    def normalised(self, x: Float[Array, "... model"]) -> Float[Array, "... model"]:
        """x / rms(x) in float32."""
        wide = x.astype(jnp.float32)
        return wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)


class WideRMSNorm(RMSNorm):
    """As RMSNorm, but the product with the weight is in float32 too."""

    def __call__(self, x: Float[Array, "... model"]) -> Float[Array, "... model"]:
        return (self.normalised(x) * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class OffsetRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), all of it in float32: a weight of zeros changes nothing."""

    def __call__(self, x: Float[Array, "... model"]) -> Float[Array, "... model"]:
        return (self.normalised(x) * (1 + self.weight[...].astype(jnp.float32))).astype(x.dtype)
