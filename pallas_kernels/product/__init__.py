"""Products of a step's tokens with a weight stored [out, in], and the gated pair of them."""

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Operation
from pallas_kernels.product.checks import ProductProblem, check

# XLA's own product is the choice for many shapes, so that it is one of the candidates: not a
# fallback, and no reason for a warning.
_OPERATION = Operation(
    name="product",
    modules={
        "reference": "pallas_kernels.product.reference",
        "gpu": "pallas_kernels.product.gpu",
    },
    kernels={"cuda": ("gpu", "reference"), "tpu": ("reference",), "rocm": ("reference",)},
    fallback="reference",
)


def product(
    x: Float[Array, "tokens in"],
    weight: Float[Array, "out in"],
    *,
    out_dtype: DTypeLike | None = None,
    weight_is_input: bool = False,
    implementation: str | None = None,
) -> Float[Array, "tokens out"]:
    """x @ weight.T, accumulated in float32 and returned in out_dtype (None: x's).

    float32 operands are multiplied at full precision on every platform: accelerators would
    otherwise round them to bfloat16 or tf32.

    weight_is_input: the weight is an argument of the compiled program and not computed in it, so
    that a kernel may read it before the kernels ahead of it have ended.
    implementation: "reference" (plain JAX) or "gpu"; None chooses what was measured to be faster.
    Raises ValueError for shapes that do not fit together, UnsupportedShape for a named
    implementation that cannot serve them.
    """
    problem = check(x, weight[None], out_dtype=out_dtype, activation=None)
    chosen = _OPERATION.choose(problem, implementation)
    return chosen.run(x, weight[None], problem, weight_is_input=weight_is_input)


def gated_product(
    x: Float[Array, "tokens in"],
    weight: Float[Array, "2 out in"],
    *,
    activation: str,
    weight_is_input: bool = False,
    implementation: str | None = None,
) -> Float[Array, "tokens out"]:
    """activation(x @ weight[0].T) * (x @ weight[1].T) in x's dtype.

    activation: "silu", "gelu", "gelu_tanh" or "relu". Kernels apply it to the float32 accumulators,
    the reference to the two products rounded to x's dtype. The rest as for `product`.
    """
    problem = check(x, weight, out_dtype=None, activation=activation)
    chosen = _OPERATION.choose(problem, implementation)
    return chosen.run(x, weight, problem, weight_is_input=weight_is_input)


__all__ = ["ProductProblem", "gated_product", "product"]
