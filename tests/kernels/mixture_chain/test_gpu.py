"""The Hopper kernel of the mixture chain: interpreted with race detection, lowered, or refused.

The interpreter has no barrier of the whole grid, so that there each phase is a launch; the barriers
themselves are checked on the device (tests/kernels/device/mixture_chain.py).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.expert_mlp.choice import ChoiceProblem
from pallas_kernels.layer_chain.gpu_plan import Plan
from pallas_kernels.mixture_chain import MixtureProblem, gpu, mixture_chain, mixture_state
from tests.kernels.mixture_chain.conformance import choice, difference, make, oracle

OPTIONS: dict[str, Any] = {"eps": 1e-6, "activation": "silu"}
FITS = MixtureProblem(
    rows=1,
    inner=2048,
    model=2048,
    ffn=1408,
    shared_ffn=2816,
    fused=3648,
    choice=choice(64, 6),
    activation="silu",
    dtype=jnp.dtype(jnp.bfloat16),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "sizes", "plan"),
    [
        # Three blocks of threads never share evenly.
        (choice(), {"shared": 128}, Plan(3, 64, 3, 1)),
        (
            choice(128, 2, softmax=False, normalise=False),
            {"ffn": 128, "fused": None},
            Plan(2, 64, 2, 2),
        ),
    ],
    ids=["shared expert", "sigmoid, last layer"],
)
def test_interpreted_without_races(
    problem: ChoiceProblem, sizes: dict, plan: Plan, capfd: pytest.CaptureFixture[str]
) -> None:
    attended, residual, weights = make(problem, **sizes)
    params = plgpu.InterpretGPUParams(detect_races=True)
    state = mixture_state(residual.shape[1], problem.experts)
    got = gpu.run(
        attended, residual, weights, state, choice=problem, interpret=params, plan=plan, **OPTIONS
    )
    wanted = oracle(attended, residual, weights, problem, OPTIONS["eps"])
    for one, other in zip(got, wanted, strict=False):
        if other is None:
            assert one is None
        else:
            assert one is not None
            assert difference(one, other) < 1e-2
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 prints, 0.12 raises


def test_lowers_for_cuda_and_is_chosen_there() -> None:
    problem = choice(64, 6)
    shapes = jax.eval_shape(lambda: make(problem, inner=1024, ffn=192, shared=384))
    state = jax.eval_shape(lambda: mixture_state(512, problem.experts))
    with dispatch.lowering_for("cuda"):
        run = jax.jit(partial(mixture_chain, choice=problem, **OPTIONS))
        text = run.trace(*shapes, state).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 2}, "a single row"),
        ({"dtype": jnp.dtype(jnp.float16)}, "bfloat16 only"),
        ({"model": 2050}, "multiples of 512"),
        ({"shared_ffn": 1000}, "not as wide as some experts"),
        ({"shared_ffn": 3 * 1408}, "more than 8 experts"),
        ({"fused": 100}, "multiple of 16"),
        ({"choice": choice(60, 4)}, "multiple of 64"),
        ({"choice": choice(512, 4)}, "up to 256"),
        ({"choice": choice(256, 4, groups=8, top_groups=4)}, "by groups"),
    ],
)
def test_says_what_it_cannot_serve(change: dict, reason: str) -> None:
    assert gpu.unsupported(FITS) is None
    assert reason in (gpu.unsupported(replace(FITS, **change)) or "")
