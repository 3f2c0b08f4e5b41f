"""What every implementation of products may rely on, or ValueError says what not."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.product.activations import ACTIVATIONS


@dataclass(frozen=True, slots=True)
class ProductProblem:
    """The static facts of one call, by which an implementation says whether it can serve.

    parts: 2 for gate and up, 1 otherwise. outputs: of each part.
    """

    tokens: int
    parts: int
    outputs: int
    inputs: int
    dtype: np.dtype
    weight_dtype: np.dtype
    out_dtype: np.dtype
    activation: str | None

    def __str__(self) -> str:
        gated = f" gated by {self.activation}" if self.activation else ""
        return (
            f"{self.tokens} tokens, {self.inputs} to {self.outputs}{gated}, {self.dtype} with "
            f"{self.weight_dtype} weights to {self.out_dtype}"
        )


def check(
    x: Float[Array, "tokens in"],
    weight: Float[Array, "parts out in"],
    *,
    out_dtype: Any,  # noqa: ANN401
    activation: str | None,
) -> ProductProblem:
    """The problem, or ValueError naming the argument, what was expected and what came."""
    if x.ndim != 2 or weight.ndim != 3:
        raise ValueError(
            "x must be [tokens, in] and the weight [out, in], or [2, out, in] if gated; got "
            f"{x.shape} and {weight.shape[1:] if activation is None else weight.shape}."
        )
    parts, outputs, inputs = weight.shape
    if x.shape[1] != inputs:
        raise ValueError(f"x has rows of {x.shape[1]}, the weight takes rows of {inputs}.")
    if activation is not None and parts != 2:
        raise ValueError(f"a gated product needs weights [2, out, in], got {weight.shape}.")
    if activation is not None and activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation must be one of {known}; got {activation!r}.")
    return ProductProblem(
        tokens=x.shape[0],
        parts=parts,
        outputs=outputs,
        inputs=inputs,
        dtype=jnp.dtype(x.dtype),
        weight_dtype=jnp.dtype(weight.dtype),
        out_dtype=jnp.dtype(x.dtype if out_dtype is None else out_dtype),
        activation=activation,
    )
