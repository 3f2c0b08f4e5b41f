"""The TPU kernel: interpreted with race detection on the cases, chosen or refused with a reason."""

import warnings
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels import dispatch
from pallas_kernels.latent_attention import LatentProblem, latent_attention, tpu
from pallas_kernels.latent_pages import abstract_latent_pages
from pallas_kernels.ragged_attention.tpu_attend import TPUPlan
from tests.kernels.latent_attention.conformance import CASES, Case, assert_conforms, make, oracle

SMALL = Case(((1, 12), (0, 0), (9, 11)), heads=2, padding_rows=0, padding_tokens=1)


@pytest.fixture(autouse=True)
def _pages_as_on_tpu():
    with dispatch.lowering_for("tpu"):
        yield


def check(case: Case, plan: TPUPlan | None, seed: int = 0, dtype: DTypeLike = jnp.float32) -> None:
    """Outputs near the oracle's, padding zero, pages bit by bit as the reference writes them."""
    inputs = make(case, dtype, seed)
    scale = case.width**-0.5
    out, pages = tpu.run(
        inputs.pages.fill(inputs.q),
        inputs.pages.fill(inputs.new),
        inputs.pages,
        inputs.rows,
        latent=case.latent,
        scale=scale,
        interpret=pltpu.InterpretParams(detect_races=True),
        plan=plan,
    )
    got, want = np.asarray(out).astype(np.float64), oracle(case, inputs, scale)
    padding = np.isnan(np.asarray(inputs.q).astype(np.float32)).any(axis=(1, 2))
    assert not got[padding].any()
    if dtype == jnp.float32:
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)
    else:
        assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want)
    expected = inputs.pages.write(inputs.new, inputs.rows)
    held = (np.asarray(each.latents).astype(np.float32) for each in (pages, expected))
    np.testing.assert_array_equal(*held)


def test_interpreted_without_races():
    check(SMALL, TPUPlan(block=8, pages=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_case_interpreted_without_races(name):
    case = CASES[name]
    check(replace(case, page_size=max(8, case.page_size)), TPUPlan(block=8, pages=2))


EDGES = st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 48, 64, 65])


@st.composite
def cases(draw):
    lengths = []
    for _ in range(draw(st.integers(0, 4))):
        kv = draw(EDGES | st.integers(0, 80))
        lengths.append((min(kv, draw(EDGES | st.integers(0, kv))), kv))
    width = draw(st.sampled_from([24, 136, 576]))
    return Case(
        tuple(lengths),
        heads=draw(st.sampled_from([1, 2, 5, 16])),
        latent=draw(st.integers(1, width)),
        width=width,
        page_size=draw(st.sampled_from([16, 32])),
        padding_rows=draw(st.integers(0, 2)) or int(not lengths),
        padding_tokens=draw(st.integers(0, 9)) or int(not any(q for q, _ in lengths)),
    )


PLANS = st.sampled_from([TPUPlan(1, 1), TPUPlan(8, 2), TPUPlan(16, 3), None])
DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16])


@pytest.mark.slow
@settings(max_examples=25)
@given(cases(), PLANS, st.integers(0, 99), DTYPES)
def test_any_ragged_shape(case, plan, seed, dtype):
    """plan None: the blocks that a chip would get."""
    check(case, plan, seed, dtype)


@pytest.mark.device
@pytest.mark.parametrize("name", CASES)
def test_on_the_chip_that_is_there(name):
    if jax.default_backend() != "tpu":
        pytest.skip("needs a TPU")
    case = CASES[name]
    case = replace(case, page_size=max(16, case.page_size))
    assert_conforms(case, "tpu", jnp.bfloat16, 1e-2)


@pytest.mark.parametrize("implementation", ["reference", "portable"])
def test_plain_implementations_take_whole_lanes(implementation):
    assert_conforms(CASES["mixed"], implementation)


def test_widths_are_raised_to_whole_lanes():
    pages = abstract_latent_pages(3, page_size=64, width=576, dtype=jnp.bfloat16)
    assert pages.latents.shape == (3, 64, 640)
    assert abstract_latent_pages(
        3, page_size=64, width=576, dtype=jnp.bfloat16, platform="cuda"
    ).latents.shape == (3, 64, 576)


def problem(**changes):
    """A decode step of DeepSeek-V3 on one shard of eight."""
    facts = {"tokens": 64, "rows": 64, "blocks": 64, "heads": 16, "latent": 512, "width": 640}
    bfloat16 = jnp.dtype(jnp.bfloat16)
    return LatentProblem(
        **{**facts, "page_size": 64, **changes}, dtype=bfloat16, page_dtype=bfloat16
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": 576}, "allocate them for platform tpu"),
        ({"page_size": 8}, "the page size must be a multiple of 16"),
        ({"rows": 512, "blocks": 2048}, "lower max_num_seqs or max_model_len"),
        ({"heads": 16384}, "bytes of vector memory"),
        ({"tokens": 2**17, "heads": 256}, "lower max_num_batched_tokens"),
    ],
)
def test_what_it_cannot_serve_it_says(changes, reason):
    assert tpu.unsupported(problem()) is None
    assert reason in str(tpu.unsupported(problem(**changes)))


def test_pages_of_8_fall_back_with_one_warning():
    inputs = make(CASES["mixed"], jnp.bfloat16)
    args = inputs.q, inputs.new, inputs.pages, inputs.rows

    def trace():
        jax.eval_shape(partial(latent_attention, latent=24, scale=0.2), *args)

    with pytest.warns(dispatch.FallbackWarning, match="page size must be a multiple of 16"):
        trace()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace()
