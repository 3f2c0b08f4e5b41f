"""The choice of experts: the kernel chooses as plain JAX does, lowers for CUDA, or says why not."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.expert_mlp import gpu_choice
from pallas_kernels.expert_mlp.choice import NOBODY, ChoiceProblem, choose

SOFTMAX = ChoiceProblem(
    tokens=7,
    experts=64,
    top_k=6,
    softmax=True,
    groups=1,
    top_groups=1,
    group_best=1,
    normalise=True,
    scale=1.5,
)
CASES = {
    "softmax": SOFTMAX,
    "two blocks": replace(SOFTMAX, tokens=16, experts=24, top_k=8, normalise=False),
    "groups": replace(SOFTMAX, experts=160, groups=8, top_groups=3, tokens=3),
    "sigmoid, groups": replace(
        SOFTMAX, softmax=False, experts=256, groups=8, top_groups=4, group_best=2, tokens=8
    ),
    "sigmoid": replace(SOFTMAX, softmax=False, experts=16, top_k=2),
}


@pytest.mark.parametrize(
    "name",
    [
        "softmax",
        "sigmoid, groups",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("groups", "sigmoid", "two blocks")
        ),
    ],
)
def test_interpreted_without_races(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    problem = CASES[name]
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((problem.tokens, problem.experts)).astype(np.float32)
    logits[:, 3] = logits[:, 9] = 3.0  # of two that are alike, the first one is chosen first
    logits = jnp.asarray(logits)
    bias = None if problem.softmax else jnp.asarray(rng.random(problem.experts), jnp.float32)
    params = plgpu.InterpretGPUParams(detect_races=True)
    got, shares = gpu_choice.run(logits, bias, problem=problem, interpret=params)
    want, exact = choose(logits, bias, problem=problem, implementation="portable")
    known = got[:, : problem.top_k]
    np.testing.assert_array_equal(known, want)
    np.testing.assert_allclose(shares[:, : problem.top_k], exact, rtol=1e-5)
    assert (np.asarray(got[:, problem.top_k :]) == NOBODY).all()
    assert not np.asarray(shares[:, problem.top_k :]).any()
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 prints, 0.12 raises


def test_lowers_for_cuda_and_is_chosen_there() -> None:
    logits = jax.ShapeDtypeStruct((7, 64), jnp.float32)
    with dispatch.lowering_for("cuda"):
        traced = jax.jit(lambda x: choose(x, None, problem=SOFTMAX)).trace(logits)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"experts": 1024}, "more than 512 experts"),
        ({"experts": 96, "top_k": 33}, "more than 32 experts a token"),
        ({"tokens": 100}, "more than 8 tokens"),
    ],
)
def test_says_what_it_cannot_serve(change: dict, reason: str) -> None:
    problem = replace(SOFTMAX, **change)
    run = partial(choose, problem=problem, implementation="gpu")
    with pytest.raises(dispatch.UnsupportedShape, match=reason):
        run(jnp.zeros((problem.tokens, problem.experts)), None)
