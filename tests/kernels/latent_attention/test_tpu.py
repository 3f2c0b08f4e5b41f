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


def check(case: Case, plan: TPUPlan, seed: int = 0) -> None:
    """Outputs near the oracle's, padding zero, pages bit by bit as the reference writes them."""
    inputs = make(case, jnp.float32, seed)
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
    padding = np.isnan(np.asarray(inputs.q)).any(axis=(1, 2))
    assert not np.asarray(out)[padding].any()
    np.testing.assert_allclose(out, oracle(case, inputs, scale), atol=1e-5, rtol=0)
    expected = inputs.pages.write(inputs.new, inputs.rows)
    np.testing.assert_array_equal(pages.latents, expected.latents)


def test_interpreted_without_races():
    check(SMALL, TPUPlan(block=8, pages=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_case_interpreted_without_races(name):
    case = CASES[name]
    check(replace(case, page_size=max(8, case.page_size)), TPUPlan(block=8, pages=2))


@st.composite
def cases(draw):
    lengths = []
    for _ in range(draw(st.integers(0, 4))):
        kv = draw(st.integers(0, 60))
        lengths.append((draw(st.integers(0, kv)), kv))
    width = draw(st.sampled_from([24, 136, 576]))
    return Case(
        tuple(lengths),
        heads=draw(st.integers(1, 5)),
        latent=draw(st.integers(1, width)),
        width=width,
        padding_rows=draw(st.integers(0, 2)) or int(not lengths),
        padding_tokens=draw(st.integers(0, 9)) or int(not any(q for q, _ in lengths)),
    )


@pytest.mark.slow
@settings(max_examples=25)
@given(cases(), st.sampled_from([TPUPlan(1, 1), TPUPlan(8, 2), TPUPlan(16, 3)]), st.integers(0, 99))
def test_any_ragged_shape(case, plan, seed):
    check(case, plan, seed)


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
