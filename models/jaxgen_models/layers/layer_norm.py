"""Layer normalisation (Ba et al., arXiv:1607.06450), with or without weight and bias."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxgen_models.layers.leaf import Leaf


class LayerNorm(nnx.Module):
    """(x - mean) / std * weight + bias over the last axis, in float32, rounded once to x's dtype.

    weight, bias: what broadcasts to x ([model], or [heads, head] for heads with a norm each), or
    None where the model has none.
    """

    def __init__(self, weight: Leaf, bias: Leaf, eps: float) -> None:
        self.weight = None if weight is None else nnx.Param(weight)
        self.bias = None if bias is None else nnx.Param(bias)
        self.eps = eps

    @classmethod
    def of(cls, weights: Mapping[str, Any], name: str, eps: float) -> "LayerNorm":
        """The norm whose weight has this name, with the bias NAME_bias where there is one."""
        return cls(weights[name], weights.get(f"{name}_bias"), eps)

    def __call__(self, x: Float[Array, "... model"]) -> Float[Array, "... model"]:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        out = centred * jax.lax.rsqrt(variance + self.eps)
        if self.weight is not None:
            out = out * self.weight[...].astype(jnp.float32)
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)
        return out.astype(x.dtype)
