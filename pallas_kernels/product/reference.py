"""Products in plain JAX: their meaning, and what runs wherever XLA's own product is the best."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import target_platform
from pallas_kernels.product.activations import ACTIVATIONS
from pallas_kernels.product.checks import ProductProblem

_MOST_SUMMED = 30_000_000


def unsupported(problem: ProductProblem) -> str | None:
    """The reference serves everything."""
    del problem
    return None


def run(
    x: Float[Array, "tokens in"],
    weight: Float[Array, "parts out in"],
    problem: ProductProblem,
    *,
    weight_is_input: bool,
) -> Float[Array, "tokens out"]:
    """As product, or as gated_product where the problem has an activation."""
    del weight_is_input
    parts, outputs, inputs = weight.shape
    out = _multiply(x, weight.reshape(parts * outputs, inputs)).astype(problem.out_dtype)
    if problem.activation is None:
        return out
    hidden = out.reshape(-1, parts, outputs)
    return ACTIVATIONS[problem.activation](hidden[:, 0]) * hidden[:, 1]


def _multiply(
    x: Float[Array, "tokens in"], weight: Float[Array, "out in"]
) -> Float[Array, "tokens out"]:
    """In float32."""
    if _sums_row(x, weight):
        return (weight.astype(jnp.float32) * x.astype(jnp.float32)).sum(axis=1)[None]
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


def _sums_row(x: Float[Array, "tokens in"], weight: Float[Array, "out in"]) -> bool:
    """Whether the product of a single row is a sum to XLA on GPUs. It makes sums of smaller weights
    by itself; as a product, one of 21 MB takes 11 us longer, one of 90 MB less long than a sum.
    """
    narrow = x.shape[0] == 1 and x.dtype != jnp.float32
    return narrow and target_platform() == "cuda" and weight.size < _MOST_SUMMED
