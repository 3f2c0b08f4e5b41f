"""The TPU kernel: interpreted with race detection over routings, chosen for TPUs, or refused."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.expert_mlp import ExpertsProblem, expert_mlp, tpu
from pallas_kernels.expert_mlp.tpu_kernel import TPUPlan
from pallas_kernels.expert_mlp.tpu_tiles import known, tiles_of_own_tokens, touched_experts
from tests.kernels.expert_mlp.conformance import CASES, NOWHERE, Case, assert_conforms, gate

TOGETHER, GATHERED = TPUPlan(24, 32, False, 2), TPUPlan(8, 32, True, 2)
INTERPRETED = {
    "all tokens": (Case(9, 2, 4, padding=2, bias=True), TOGETHER),
    "a shared expert": (Case(9, 2, 4, bias=True, shared=128), TOGETHER),
    "own tokens": (
        Case(9, 3, 2, routing="shard", padding=2, ffn=256),
        replace(GATHERED, chunk=128),
    ),
    "one": (Case(1, 2, 5), TPUPlan(8, 64, False, 2)),
    "nothing": (Case(0, 2, 4, padding=4), TOGETHER),
    "nothing gathered": (Case(0, 2, 4, padding=4), GATHERED),
    "a single tile": (Case(1, 1, 1, padding=1), GATHERED),
    "all to one": (Case(40, 1, 6, routing="one", bias=True), replace(GATHERED, rows=16)),
}
QUICK = ("own tokens",)

PROBLEM = ExpertsProblem(
    tokens=64,
    top_k=2,
    experts=8,
    model=4096,
    ffn=3584,
    dtype=jnp.dtype(jnp.bfloat16),
    weight_dtype=jnp.dtype(jnp.bfloat16),
    gate=gate,
)


def check(case: Case, plan: TPUPlan) -> None:
    params = pltpu.InterpretParams(detect_races=True)
    assert_conforms(partial(tpu.run, interpret=params, plan=plan), case, jnp.float32, 1e-5)


@pytest.mark.parametrize(
    "name",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in INTERPRETED],
)
def test_interpreted_without_races(name: str) -> None:
    check(*INTERPRETED[name])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    experts = draw(st.integers(1, 7))
    return Case(
        tokens=draw(st.integers(0, 20)),
        top_k=draw(st.integers(1, experts)),
        experts=experts,
        padding=draw(st.integers(1, 3)),
        ffn=draw(st.sampled_from([64, 128])),  # laid out one way and the other
        routing=draw(st.sampled_from(["random", "shard"])),
        bias=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(cases(), st.sampled_from([TOGETHER, GATHERED, TPUPlan(16, 64, True, 1)]))
def test_any_routing(case: Case, plan: TPUPlan) -> None:
    check(case, plan)


@pytest.mark.device
@pytest.mark.parametrize("name", CASES)
def test_on_the_chip_that_is_there(name: str) -> None:
    if jax.default_backend() != "tpu":
        pytest.skip("needs a TPU")
    run = jax.jit(partial(expert_mlp, implementation="tpu"), static_argnames="gate")
    assert_conforms(run, replace(CASES[name], model=256, ffn=128), jnp.bfloat16, 2e-2)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 8), (300, 16)])
def test_every_assignment_has_a_place_of_its_own_in_a_tile_of_its_expert(
    tokens: int, rows: int
) -> None:
    rng = np.random.default_rng(tokens)
    experts = np.argsort(rng.random((tokens, 30)), axis=1)[:, :4].astype(np.int32)
    experts = np.where(experts < 15, experts - 3, NOWHERE)
    listed = jax.jit(tiles_of_own_tokens, static_argnums=(1, 2))
    tiles, places = listed(jnp.asarray(experts), 9, rows)
    mine = np.asarray(known(jnp.asarray(experts), 9))
    place = np.asarray(places.place)[mine]
    assert len(set(place)) == mine.sum()
    np.testing.assert_array_equal(np.asarray(tiles.expert)[place // rows], experts[mine])
    np.testing.assert_array_equal(np.asarray(places.token)[place], np.nonzero(mine)[0])
    assert len(set(place // rows)) == int(tiles.live)  # none is empty
    touched = jax.jit(touched_experts, static_argnums=1)(jnp.asarray(experts), 9)
    assert touched.expert[: int(touched.live)].tolist() == sorted(set(experts[mine]))


@pytest.mark.parametrize(
    ("change", "rows", "chunk", "gather"),
    [
        ({"tokens": 1}, 16, 256, False),
        ({"tokens": 64, "ffn": 1408, "model": 2048}, 64, 128, False),
        ({"tokens": 64, "ffn": 352, "model": 2048}, 64, 352, False),
        ({"tokens": 2048}, 256, 256, True),
        ({"tokens": 2048, "top_k": 8, "experts": 256, "model": 7168, "ffn": 256}, 128, 128, True),
        (
            {"tokens": 2048, "top_k": 8, "experts": 4, "model": 7168, "ffn": 256, "spread": 64},
            *(128, 128, True),
        ),
    ],
)
def test_plans_fit_every_chip(change: dict, rows: int, chunk: int, gather: bool) -> None:
    plan = tpu.plan_for(replace(PROBLEM, **change))
    assert plan == TPUPlan(rows, chunk, gather, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weight_dtype": jnp.dtype(jnp.float32)}, "both be bfloat16"),
        ({"model": 96}, "multiple of 128"),
        ({"model": 8192, "ffn": 14336 + 32}, "vector memory"),
    ],
)
def test_says_what_it_cannot_serve(change: dict, reason: str) -> None:
    assert reason in str(tpu.unsupported(replace(PROBLEM, **change)))
    assert tpu.unsupported(PROBLEM) is None
