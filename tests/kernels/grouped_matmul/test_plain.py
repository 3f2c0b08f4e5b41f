"""The implementations in plain JAX conform, and refuse what does not fit."""

import jax.numpy as jnp
import ml_dtypes
import pytest

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import grouped_matmul
from tests.kernels.grouped_matmul.conformance import CASES, assert_conforms


@pytest.mark.newest
@pytest.mark.parametrize("implementation", ["reference", "portable"])
@pytest.mark.parametrize("name", CASES)
def test_conforms(name: str, implementation: str) -> None:
    assert_conforms(CASES[name], implementation)


@pytest.mark.parametrize("implementation", ["reference", "portable"])
def test_conforms_in_bfloat16(implementation: str) -> None:
    assert_conforms(CASES["skewed"], implementation, ml_dtypes.bfloat16, tolerance=2e-2)


@pytest.mark.parametrize("name", ["one_row", "nothing_live", "decode"])
def test_a_handful_of_rows_on_an_accelerator_conforms(name: str) -> None:
    with dispatch.lowering_for("cuda"):
        assert_conforms(CASES[name], "portable")


def test_group_sizes_of_another_type_are_refused() -> None:
    x, weight, sizes = jnp.zeros((4, 8)), jnp.zeros((3, 6, 8)), jnp.zeros(3, jnp.int16)
    with pytest.raises(ValueError, match=r"group_sizes must be int32 \(3,\)"):
        grouped_matmul(x, weight, sizes)
