"""Products on Hopper GPUs with Mosaic GPU: which of them, and in tiles of what size."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.hopper import wrong_device
from pallas_kernels.product.checks import ProductProblem
from pallas_kernels.product.gpu_kernel import ACTIVATIONS, multiply
from pallas_kernels.product.gpu_plan import GRANULE, Plan, choose


def unsupported(problem: ProductProblem) -> str | None:
    """Why the Hopper kernel should not serve this problem; None if it should."""
    wrong = wrong_device()
    if wrong is not None:
        return wrong
    if problem.dtype not in (jnp.bfloat16, jnp.float16) or problem.weight_dtype != problem.dtype:
        return "tokens and weights must both be bfloat16 or both be float16"
    if problem.activation not in (None, *ACTIVATIONS):
        return f"it does not compute {problem.activation}"
    plan = choose(problem)
    return plan if isinstance(plan, str) else None


def run(
    x: Float[Array, "tokens in"],
    weight: Float[Array, "parts out in"],
    problem: ProductProblem,
    *,
    weight_is_input: bool,
    plan: Plan | None = None,
    interpret: Any = None,
) -> Float[Array, "tokens out"]:
    """As product and gated_product. interpret: of Mosaic GPU's interpreter, for tests."""
    tokens = x.shape[0]
    plan = choose(problem) if plan is None else plan
    padding = -tokens % (GRANULE * plan.cluster)  # each block of a cluster reads its share of them
    if padding:
        x = jnp.pad(x, ((0, padding), (0, 0)))
    out = multiply(
        x,
        weight,
        plan=plan,
        out_dtype=problem.out_dtype,
        activation=problem.activation,
        read_ahead=weight_is_input and interpret is None,
        interpret=interpret,
    )
    return out[:tokens] if padding else out
