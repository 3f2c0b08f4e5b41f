"""What top-k and top-p keep: exactly the head of the distribution, however few bits a pass has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen.sampling import SamplingParams
from jaxgen.sampling.truncate import keep_top_k, keep_top_p, smallest_kept

finite = st.floats(-50, 50, width=32, allow_subnormal=False)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(finite, min_size=9, max_size=9), min_size=1, max_size=1),
    top_k=st.integers(0, 12),
    top_p=st.floats(2**-7, 1.0, width=32),
)
def test_cuts_keep_exactly_the_tail(rows, top_k, top_p):
    logits = np.array(rows, np.float32)
    kept = np.isfinite(jax.jit(keep_top_k)(logits, jnp.array([top_k])))[0]
    smallest = np.sort(logits[0])[::-1][min(top_k or 9, 9) - 1]
    np.testing.assert_array_equal(kept, logits[0] >= smallest)

    kept = np.isfinite(jax.jit(keep_top_p)(logits, jnp.array([top_p], jnp.float32)))[0]
    exact = logits[0].astype(np.float64)
    chances = np.exp(exact - exact.max())
    chances /= chances.sum()
    assert kept[logits[0].argmax()]
    assert logits[0][kept].min() > logits[0][~kept].max(initial=-np.inf)
    assert chances[kept].sum() >= top_p - 1e-5
    # Less is no difference between probabilities in float32, and equal ones all stay.
    above_smallest = logits[0] > logits[0][kept].min() + np.float32(1e-6)
    assert top_p == 1.0 or chances[above_smallest].sum() < top_p + 1e-5


@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize(("digit", "rows"), [(1, 3), (2, 3), (3, 3), (3, 20), (4, 3)])
def test_passes_of_any_size_find_the_same_threshold(digit, unroll, rows):
    """CPUs look for fewer bits at once than GPUs."""
    rng = np.random.default_rng(digit)
    values = rng.normal(0, 10, (rows, 300)).astype(np.float32)
    values[:, ::7] = values[:, 1::7][:, : values[:, ::7].shape[1]]  # ties
    values[1, :200], values[2, :] = -np.inf, -0.0
    search = functools.partial(smallest_kept, digit=digit, unroll=unroll)
    places = rng.integers(1, 301, rows)
    wanted = jnp.asarray(places, jnp.float32)
    found = search(values, wanted, weigh=jnp.ones_like, bits=32)
    smallest = np.sort(values, axis=-1)[:, ::-1][np.arange(rows), places - 1]
    kept = values >= found[:, None]  # by JAX, to which numbers below the normal ones are zeros
    np.testing.assert_array_equal(kept, values >= smallest[:, None])

    mass = np.exp(values - values.max(axis=-1, keepdims=True))
    wanted = rng.uniform(0.01, 0.99, rows).astype(np.float32) * mass.sum(axis=-1)
    found = np.asarray(search(mass, wanted, weigh=lambda each: each, bits=30))
    for row, least, amount in zip(mass, found, wanted, strict=True):
        assert least in row
        assert row[row >= least].sum() >= amount * (1 - 1e-5)
        assert row[row > least].sum() < amount * (1 + 1e-5)


@pytest.mark.parametrize("top_p", [1e-300, 1e-45, 1e-40, 1e-20])
def test_the_smallest_mass_is_the_likeliest_token(top_p):
    """float32 knows no such numbers: taken for 0 they would leave nothing to draw from."""
    logits = np.zeros((1, 9), np.float32)
    logits[0, 4] = 1
    least = jnp.array([SamplingParams(top_p=top_p).top_p], jnp.float32)
    kept = np.isfinite(jax.jit(keep_top_p)(logits, least))
    assert kept.tolist() == [[token == 4 for token in range(9)]]


@pytest.mark.parametrize(("platform", "loops"), [("cpu", 1), ("tpu", 1), ("cuda", 0)])
def test_passes_are_unrolled_where_that_pays(platform, loops):
    """On a GPU, where the loop's counting takes kernels; elsewhere it is only more code."""
    shapes = jax.ShapeDtypeStruct((4, 300), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.float32)
    traced = jax.jit(keep_top_p).trace(*shapes)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.while") == loops
