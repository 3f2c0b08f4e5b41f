"""The activations that a gated product may have."""

from collections.abc import Callable
from functools import partial
from typing import Final

import jax
from jaxtyping import Array

ACTIVATIONS: Final[dict[str, Callable[[Array], Array]]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
