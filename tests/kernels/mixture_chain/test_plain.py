"""The mixture chain in plain JAX: its meaning, and what it refuses."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.mixture_chain import mixture_chain, mixture_state
from tests.kernels.mixture_chain.conformance import choice, difference, make, oracle

OPTIONS: dict[str, Any] = {"eps": 1e-6, "activation": "silu"}


@pytest.mark.parametrize("sizes", [{"shared": 96}, {"fused": None}], ids=str)
def test_reference_means_the_layer(sizes: dict) -> None:
    problem = choice(normalise="shared" in sizes)
    arrays = make(problem, **sizes, dtype=jnp.float32)
    wanted = oracle(*arrays, problem, OPTIONS["eps"])
    got = mixture_chain(
        *arrays, mixture_state(512, 64), choice=problem, implementation="reference", **OPTIONS
    )
    for one, other in zip(got, wanted, strict=False):
        if other is None:
            assert one is None
        else:
            assert one is not None
            assert difference(one, other) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router": jnp.zeros((63, 512), jnp.bfloat16)}, "router must be"),
        ({"next_norm": None}, "next_norm and following must be given together"),
        ({"shared_down": jnp.zeros((512, 64), jnp.bfloat16)}, "given together"),
        ({"out": jnp.zeros((512, 512), jnp.float32)}, "one dtype"),
    ],
    ids=["router", "half a next layer", "half a shared expert", "dtypes"],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    attended, residual, weights = make(choice())
    weights = replace(weights, **change)
    state = mixture_state(512, 64)
    with pytest.raises(ValueError, match=message):
        mixture_chain(attended, residual, weights, state, choice=choice(), **OPTIONS)
