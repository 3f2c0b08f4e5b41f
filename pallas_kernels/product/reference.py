"""Products in plain JAX: their meaning, and what runs wherever XLA's own product is the best."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import target_platform
from pallas_kernels.product.activations import ACTIVATIONS
from pallas_kernels.product.checks import ProductProblem

_MOST_SUMMED = 30_000_000

_COPIES = {"cpu": 2, "cuda": 8}
"""Of a single narrow row, so that it is a product of matrices."""


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
    out = _multiply(x, weight.reshape(parts * outputs, inputs), problem.out_dtype)
    if problem.activation is None:
        return out
    hidden = out.reshape(-1, parts, outputs)
    return ACTIVATIONS[problem.activation](hidden[:, 0]) * hidden[:, 1]


def _multiply(
    x: Float[Array, "tokens in"], weight: Float[Array, "out in"], out_dtype: DTypeLike
) -> Float[Array, "tokens out"]:
    """Accumulated in float32, rounded once."""
    if _sums_row(x, weight):
        wide = weight.astype(jnp.float32) * x.astype(jnp.float32)
        return wide.sum(axis=1)[None].astype(out_dtype)
    platform = target_platform()
    # Of a single narrow row XLA's CPU product reads 1 GB/s of weights, of two rows ten times as
    # much; cuBLAS would have the weights converted to float32 first.
    copies = 1 if x.shape[0] > 1 or x.dtype == jnp.float32 else _COPIES.get(platform, 1)
    # Accelerators accumulate narrow products in float32 whatever the result's type, and XLA does
    # not always move a conversion into the product: it would write and read float32 in between.
    result_dtype = jnp.float32 if platform == "cpu" else out_dtype
    out = jax.lax.dot_general(
        jnp.broadcast_to(x, (copies, x.shape[1])) if copies > 1 else x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=result_dtype,
    )
    return out[: x.shape[0]].astype(out_dtype)


def _sums_row(x: Float[Array, "tokens in"], weight: Float[Array, "out in"]) -> bool:
    """Whether the product of a single row is a sum to XLA on GPUs. It makes sums of smaller weights
    by itself; as a product, one of 21 MB takes 11 us longer, one of 90 MB less long than a sum.
    """
    narrow = x.shape[0] == 1 and x.dtype != jnp.float32
    return narrow and target_platform() == "cuda" and weight.size < _MOST_SUMMED
