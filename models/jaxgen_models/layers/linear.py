"""Products with weights stored [out, in], as checkpoints hold them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def project(x: Float[Array, "tokens model"], weight: Float[Array, "out in"]) -> Float[Array, "..."]:
    """x @ weight.T in x's dtype, accumulated in float32.

    float32 operands are multiplied at full precision on every platform: accelerators would
    otherwise round them to bfloat16 or tf32.
    """
    out = jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return out.astype(x.dtype)


def project_to_float32(
    x: Float[Array, "tokens model"], weight: Float[Array, "out in"]
) -> Float[Array, "tokens out"]:
    """As `project`, keeping the float32 accumulator: logits are never rounded to a narrow type."""
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
