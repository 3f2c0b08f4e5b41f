"""The two ceilings of a device, measured: how fast it reads and how fast it multiplies."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxgen.engine.cost import Ceilings

_REPEATS = 20


def measure_ceilings(dtype: jnp.dtype) -> Ceilings:
    """Sums a large array, and multiplies large square matrices of `dtype`."""
    big = jax.default_backend() != "cpu"
    array = jax.random.normal(jax.random.key(0), ((1 << 30) if big else (1 << 26),), jnp.bfloat16)
    read = _seconds(jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32)), array)
    side = 8192 if big else 1024
    matrix = jax.random.normal(jax.random.key(1), (side, side), dtype)
    product = _seconds(jax.jit(lambda m: m @ m), matrix)
    return Ceilings(array.nbytes / read, 2 * side**3 / product)


def _seconds(fn: Callable[[jax.Array], jax.Array], argument: jax.Array) -> float:
    """Median time of one call, several being queued at once so that dispatch is hidden."""
    jax.block_until_ready(fn(argument))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([fn(argument) for _ in range(_REPEATS)])
        times.append((time.perf_counter() - start) / _REPEATS)
    return statistics.median(times)
