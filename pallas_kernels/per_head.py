"""Products that each head makes with a weight of its own: from latents, to latents."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.dispatch import target_platform


def per_head(equation: str, x: Array, weight: Array) -> Array:
    """A product per head, in x's dtype, accumulated in float32."""
    dtype = result = x.dtype
    if target_platform() == "cpu":
        # XLA has no batched product of narrow types there, and folds casts that nothing holds back.
        wide = x.astype(jnp.float32), weight.astype(jnp.float32)
        x, weight = jax.lax.optimization_barrier(wide)
        result = x.dtype
    # Accelerators accumulate narrow products in float32 whatever the result's type. Asked for
    # float32, XLA's GPU product writes that, heads outermost, and a second kernel puts it in order.
    out = jnp.einsum(
        equation,
        x,
        weight,
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=result,
    )
    return out.astype(dtype)
