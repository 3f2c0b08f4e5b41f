"""Products with weights stored [out, in], as checkpoints hold them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import target_platform


def project(x: Float[Array, "tokens model"], weight: Float[Array, "out in"]) -> Float[Array, "..."]:
    """x @ weight.T in x's dtype, accumulated in float32."""
    return project_to_float32(x, weight).astype(x.dtype)


def project_to_float32(
    x: Float[Array, "tokens model"], weight: Float[Array, "out in"]
) -> Float[Array, "tokens out"]:
    """As `project`, keeping the float32 accumulator: logits are never rounded to a narrow type.

    float32 operands are multiplied at full precision on every platform: accelerators would
    otherwise round them to bfloat16 or tf32.
    """
    # XLA's CPU product of one narrow row reads 1 GB/s of weights, of two rows ten times as much.
    doubled = x.shape[0] == 1 and x.dtype != jnp.float32 and target_platform() == "cpu"
    out = jax.lax.dot_general(
        jnp.broadcast_to(x, (2, x.shape[1])) if doubled else x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return out[:1] if doubled else out
