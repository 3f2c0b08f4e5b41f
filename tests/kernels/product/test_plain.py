"""The product in plain JAX conforms, is what other platforms run, and refuses what does not fit."""

import warnings

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.product import gated_product, product
from tests.kernels.product.conformance import CASES, assert_close, make


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_conforms(name: str, dtype: jnp.dtype) -> None:
    case = CASES[name]
    x, weight, want = make(case, dtype)
    if case.activation is None:
        got = product(x, weight[0], out_dtype=case.out_dtype)
        assert got.dtype == (case.out_dtype or dtype)
    else:
        got = gated_product(x, weight, activation=case.activation)
        assert got.dtype == dtype
    assert_close(got, want, 1e-5 if dtype == jnp.float32 else 1e-2)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="silu, gelu"):
        gated_product(jnp.zeros((3, 8)), jnp.zeros((2, 6, 8)), activation="tanh")


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_what_xla_serves_by_design_is_no_reason_to_warn(platform: str) -> None:
    with dispatch.lowering_for(platform), warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(product, jnp.zeros((3, 8)), jnp.zeros((6, 8)))
