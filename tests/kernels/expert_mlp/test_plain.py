"""The implementations in plain JAX conform, and refuse what does not fit."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.expert_mlp import expert_mlp
from tests.kernels.expert_mlp.conformance import CASES, assert_conforms, gate, make


def _run(implementation: str) -> Any:
    return jax.jit(partial(expert_mlp, implementation=implementation), static_argnames="gate")


@pytest.mark.parametrize("implementation", ["reference", "portable"])
@pytest.mark.parametrize("name", CASES)
def test_conforms(name: str, implementation: str) -> None:
    assert_conforms(_run(implementation), CASES[name], jnp.float32, 1e-5)


@pytest.mark.parametrize("implementation", ["reference", "portable"])
def test_conforms_in_bfloat16(implementation: str) -> None:
    assert_conforms(_run(implementation), CASES["bias"], jnp.bfloat16, 2e-2)


def test_what_does_not_fit_is_refused() -> None:
    x, experts, shares, gate_up, down, _, _ = make(CASES["few"], jnp.float32)
    with pytest.raises(ValueError, match=r"experts must be int32 \(8, top_k\)"):
        expert_mlp(x, experts.astype(jnp.int16), shares, gate_up, down, gate=gate)
