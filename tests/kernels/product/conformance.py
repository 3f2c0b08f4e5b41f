"""What products must do, as cases that every implementation runs against float64."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """activation: gated if given. out_dtype: None for x's."""

    tokens: int
    outputs: int = 96
    inputs: int = 128
    activation: str | None = None
    out_dtype: Any = None


CASES = {
    "one_row": Case(1),
    "three_rows": Case(3),
    "nine_rows": Case(9, outputs=72),
    "seventeen_rows": Case(17, outputs=80, inputs=192),
    "a_warpgroup": Case(64),
    "a_hundred_rows": Case(100),
    "many_rows": Case(250, outputs=64, inputs=64),
    "several_tiles_of_rows": Case(300, outputs=40, inputs=64),
    "float32_results": Case(17, out_dtype=jnp.float32),
    "gated": Case(17, activation="silu"),
    "gated_by_gelu_tanh": Case(3, activation="gelu_tanh"),
    "gated_by_relu": Case(70, activation="relu"),
}

_FLOAT64 = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}


def make(case: Case, dtype: Any) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Tokens, the weight ([parts, out, in]), and the product in float64."""
    rng = np.random.default_rng(0)
    parts = 1 if case.activation is None else 2
    x = jnp.asarray(rng.standard_normal((case.tokens, case.inputs)), dtype)
    shape = (parts, case.outputs, case.inputs)
    weight = jnp.asarray(rng.standard_normal(shape) / case.inputs**0.5, dtype)
    wide, each = np.asarray(x).astype(np.float64), np.asarray(weight).astype(np.float64)
    want = wide @ each[0].T
    if case.activation is not None:
        want = _FLOAT64[case.activation](want) * (wide @ each[1].T)
    return x, weight, want


def assert_close(got: jax.Array, want: np.ndarray, tolerance: float = 1e-2) -> None:
    """Relative error of the norm; NaN is not less."""
    exact = np.asarray(got).astype(np.float64)
    assert exact.shape == want.shape
    assert np.linalg.norm(exact - want) < tolerance * np.linalg.norm(want)
