"""Activation functions by their Hugging Face names."""

from collections.abc import Callable
from typing import Final

import jax
from jaxtyping import Array, Float


def _gelu_exact(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: Final[dict[str, Callable[[Array], Array]]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": _gelu_exact,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": jax.nn.relu,
}
