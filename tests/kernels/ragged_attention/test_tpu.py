"""The TPU kernel: interpreted with race detection on every case that it serves."""

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
from pallas_kernels.pages import kv_page_bytes, kv_pages
from pallas_kernels.ragged_attention import ragged_attention, tpu
from pallas_kernels.ragged_attention.tpu_attend import TPUPlan
from tests.kernels.ragged_attention.conformance import CASES, Case, assert_conforms, make, oracle

QUICK = {"all_options": [], "window_8_decode": [pytest.mark.newest]}
SERVED = [name for name in CASES if name != "alibi_table"]


@pytest.fixture(autouse=True)
def _pages_as_on_tpu():
    with dispatch.lowering_for("tpu"):
        yield


def check(case: Case, plan: TPUPlan | None, seed: int = 0, dtype: DTypeLike = jnp.float32) -> None:
    """Outputs near the oracle's, padding zero, pages bit by bit as the reference writes them."""
    inputs = make(case, dtype, seed)
    options = {"window": None, "soft_cap": None, "sinks": None, "alibi": None, **inputs.options}
    scale = case.head_dim**-0.5
    out, pages = tpu.run(
        inputs.q,
        inputs.k_new,
        inputs.v_new,
        inputs.pages,
        inputs.rows,
        scale=scale,
        interpret=pltpu.InterpretParams(detect_races=True),
        plan=plan,
        **options,
    )
    got, want = np.asarray(out).astype(np.float64), oracle(case, inputs, scale)
    padding = np.isnan(np.asarray(inputs.q).astype(np.float32)).any(axis=(1, 2))
    assert not got[padding].any()
    if dtype == jnp.float32:
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)
    else:
        assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want)
    expected = inputs.pages.write(inputs.k_new, inputs.v_new, inputs.rows)
    for got, want in zip(jax.tree.leaves(pages), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(*(np.asarray(a).astype(np.float32) for a in (got, want)))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=QUICK.get(n, [pytest.mark.slow])) for n in SERVED]
)
def test_interpreted_without_races(name):
    case = CASES[name]
    check(replace(case, page_size=max(8, case.page_size)), TPUPlan(block=8, pages=2))


EDGES = st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 48, 64, 65])


@st.composite
def cases(draw):
    lengths = []
    for _ in range(draw(st.integers(0, 4))):
        kv = draw(EDGES | st.integers(0, 80))
        lengths.append((min(kv, draw(EDGES | st.integers(0, kv))), kv))
    kv_heads = draw(st.integers(1, 2))
    options = {"window": draw(st.sampled_from([None, 1, 7, 16, 30]))}
    if draw(st.booleans()):
        options |= {"sinks": True, "soft_cap": 2.0}
    if draw(st.booleans()):
        options["alibi"] = True
    return Case(
        tuple(lengths),
        heads=kv_heads * draw(st.sampled_from([1, 3, 4, 7])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 64, 80, 96, 128, 192, 256])),
        page_size=draw(st.sampled_from([16, 32])),
        padding_rows=draw(st.integers(0, 2)) or int(not lengths),
        padding_tokens=draw(st.integers(0, 9)) or int(not any(q for q, _ in lengths)),
        options=options,
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
@pytest.mark.parametrize("name", SERVED)
def test_on_the_chip_that_is_there(name):
    if jax.default_backend() != "tpu":
        pytest.skip("needs a TPU")
    case = CASES[name]
    case = replace(case, page_size=max(16, case.page_size))
    assert_conforms(case, "tpu", jnp.bfloat16, 1e-2)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("name", "implementation"), [("mixed", "reference"), ("head_192", "portable")]
)
def test_plain_implementations_take_packed_pages(name, implementation):
    assert_conforms(CASES[name], implementation)


@pytest.mark.parametrize(
    ("head_dim", "lanes"), [(16, 128), (64, 128), (80, 256), (96, 256), (128, 256), (192, 384)]
)
def test_packed_pages_take_the_bytes_of_their_lanes(head_dim, lanes):
    shape = {"page_size": 16, "kv_heads": 3, "head_dim": head_dim, "dtype": jnp.bfloat16}
    assert kv_page_bytes(**shape) == 16 * 3 * lanes * 2
    pages = kv_pages(5, **shape)
    assert (pages.head_dim, pages.num_pages, pages.packed) == (head_dim, 5, True)


def test_what_it_cannot_serve_falls_back_with_one_warning():
    inputs = make(CASES["alibi_table"], jnp.float32)
    args = inputs.q, inputs.k_new, inputs.v_new, inputs.pages, inputs.rows
    with pytest.warns(dispatch.FallbackWarning, match="comes from a table"):
        jax.eval_shape(partial(ragged_attention, scale=0.25, **inputs.options), *args)


def test_pages_of_another_platform_are_refused():
    with dispatch.lowering_for("cpu"):
        inputs = make(CASES["decode"], jnp.float32)
    with pytest.raises(dispatch.UnsupportedShape, match="allocate them for platform tpu"):
        ragged_attention(
            inputs.q,
            inputs.k_new,
            inputs.v_new,
            inputs.pages,
            inputs.rows,
            scale=0.25,
            implementation="tpu",
        )


def test_a_block_table_beyond_scalar_memory_is_named():
    pages = kv_pages(2, page_size=16, kv_heads=1, head_dim=128, dtype=jnp.bfloat16)
    problem = tpu.AttentionProblem(
        tokens=256,
        rows=256,
        blocks=2048,
        heads=1,
        kv_heads=1,
        head_dim=128,
        page_size=16,
        dtype=jnp.dtype(jnp.bfloat16),
        page_dtype=jnp.dtype(pages.keys.dtype),
        window=None,
        soft_cap=None,
        sinks=False,
        alibi=False,
        packed=True,
    )
    assert "lower max_num_seqs or max_model_len" in str(tpu.unsupported(problem))
