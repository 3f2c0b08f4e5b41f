"""The largest values of long rows are those that a sort finds, equal ones in the same order."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxgen.sampling.long_rows import top_k


def rows(kind, n):
    rng = np.random.default_rng(n)
    match kind:
        case "normal":
            return rng.normal(size=(3, n))
        case "many equal":
            return rng.integers(0, 3, size=(3, n)).astype(float)
        case "all equal":
            return np.zeros((3, n))
        case "mostly banned":
            values = np.full((3, n), -np.inf)
            values[:, rng.integers(0, n, size=7)] = 1.0
            return values
        case "in one block":
            values = rng.normal(size=(3, n))
            values[:, 300:330] += 100
            return values
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind", ["normal", "many equal", "all equal", "mostly banned", "in one block"]
)
@pytest.mark.parametrize(("n", "count"), [(128, 5), (1000, 3), (5000, 20), (4096, 20), (2561, 20)])
def test_it_is_what_a_sort_finds(kind, n, count):
    values = jnp.asarray(rows(kind, max(n, 400))[:, :n], jnp.float32)
    for got, wanted in zip(top_k(values, count), lax.top_k(values, count), strict=True):
        np.testing.assert_array_equal(got, wanted)
