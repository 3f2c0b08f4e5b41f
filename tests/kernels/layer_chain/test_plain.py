"""The chain's reference and its checks."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from pallas_kernels.layer_chain import chain_state, layer_chain
from tests.kernels.layer_chain.conformance import difference, make, oracle


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("fused", [None, 48])
def test_reference_is_what_it_says(fused: int | None, activation: str) -> None:
    attended, residual, weights = make(
        3, inner=40, model=24, ffn=56, fused=fused, bias=True, dtype=jnp.float32
    )
    got, got_fused, _ = layer_chain(
        attended, residual, weights, chain_state(), eps=1e-3, activation=activation
    )
    want, want_fused = oracle(attended, residual, weights, 1e-3, activation)
    assert difference(got, want) < 1e-5
    assert (got_fused is None) == (fused is None)
    if want_fused is not None:
        assert difference(got_fused, want_fused) < 1e-5


def test_what_does_not_fit_together_is_refused() -> None:
    attended, residual, weights = make(2)
    common = {"eps": 1e-5, "activation": "silu"}
    with pytest.raises(ValueError, match=r"down must be \(512, 1024\)"):
        layer_chain(
            attended, residual, replace(weights, down=weights.down.T), chain_state(), **common
        )
    with pytest.raises(ValueError, match="together"):
        layer_chain(attended, residual, replace(weights, qkv=None), chain_state(), **common)
    with pytest.raises(ValueError, match="one dtype"):
        layer_chain(attended.astype(jnp.float32), residual, weights, chain_state(), **common)
    with pytest.raises(ValueError, match="activation"):
        layer_chain(attended, residual, weights, chain_state(), eps=1e-5, activation="tanh")
