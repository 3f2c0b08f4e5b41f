"""Products that each head makes with a weight of its own: from latents, to latents."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.dispatch import target_platform


def per_head(equation: str, x: Array, weight: Array) -> Array:
    """A product per head, in x's dtype, accumulated in float32."""
    dtype = x.dtype
    if target_platform() == "cpu":
        # XLA has no batched product of narrow types there, and folds casts that nothing holds back.
        wide = x.astype(jnp.float32), weight.astype(jnp.float32)
        x, weight = jax.lax.optimization_barrier(wide)
    out = jnp.einsum(
        equation,
        x,
        weight,
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return out.astype(dtype)
