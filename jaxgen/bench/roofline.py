"""The two ceilings of a device, measured: how fast it reads and how fast it multiplies."""

import jax
import jax.numpy as jnp

from jaxgen.bench.kernels.timing import median_call_seconds
from jaxgen.engine.cost import Ceilings


def measure_ceilings(dtype: jnp.dtype) -> Ceilings:
    """Sums a large array, and multiplies large square matrices of `dtype`."""
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    square = jax.jit(lambda m: m @ m)
    big = jax.default_backend() != "cpu"
    size, side, queued = (1 << 30, 8192, 20) if big else (1 << 24, 512, 2)
    array = jax.random.normal(jax.random.key(0), (size,), jnp.bfloat16)
    read = median_call_seconds(lambda: total(array), 1, queued=queued, batches=5)
    matrix = jax.random.normal(jax.random.key(1), (side, side), dtype)
    product = median_call_seconds(lambda: square(matrix), 1, queued=queued, batches=5)
    return Ceilings(array.nbytes / read, 2 * side**3 / product)
