"""The two ceilings of a device, measured, and the least time that a step's work allows."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxgen.engine.memory import block_bytes
from jaxgen.engine.model import Model

_REPEATS = 20


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Read bandwidth in bytes/s and rate of matrix products in FLOP/s, of one device."""

    bandwidth: float
    matrix_rate: float


def measure_ceilings(dtype: jnp.dtype) -> Ceilings:
    """Sums a large array, and multiplies large square matrices of `dtype`."""
    big = jax.default_backend() != "cpu"
    array = jax.random.normal(jax.random.key(0), ((1 << 30) if big else (1 << 26),), jnp.bfloat16)
    read = _seconds(jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32)), array)
    side = 8192 if big else 1024
    matrix = jax.random.normal(jax.random.key(1), (side, side), dtype)
    product = _seconds(jax.jit(lambda m: m @ m), matrix)
    return Ceilings(array.nbytes / read, 2 * side**3 / product)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Least work of one step on one device: bytes read, and FLOPs of its matrix products."""

    bytes_read: int
    flops: int

    def seconds(self, ceilings: Ceilings) -> float:
        """The roofline: the larger of the two times."""
        return max(self.bytes_read / ceilings.bandwidth, self.flops / ceilings.matrix_rate)


def step_cost(model: Model, *, tokens: int, kv_tokens: int, rows: int) -> StepCost:
    """Every weight and every live KV token once; two FLOPs a weight and token, attention added.

    tokens: in the step. kv_tokens: live tokens of all rows together. rows: that get logits. An
    embedding that is looked up only, and not also the unembedding, is not read as a whole.
    """
    config = model.config
    shards = model.tensor_shards
    vocabulary = int(config.vocab_size) * int(config.model_dim) // shards
    weights = model.bytes_per_device() // model.dtype.itemsize
    body = weights - (vocabulary if config.tied else 2 * vocabulary)
    kv_bytes = sum(block_bytes(model, 1)) * kv_tokens
    attention = 4 * int(config.num_layers) * int(config.heads) * int(config.head_dim)
    per_token = kv_tokens / max(1, rows)
    return StepCost(
        bytes_read=(body + vocabulary) * model.dtype.itemsize + kv_bytes,
        flops=2 * body * tokens
        + 2 * vocabulary * rows
        + int(attention * tokens * per_token * (0.5 if tokens > rows else 1)) // shards,
    )


def _seconds(fn: Callable[[jax.Array], jax.Array], argument: jax.Array) -> float:
    """Median time of one call, several being queued at once so that dispatch is hidden."""
    jax.block_until_ready(fn(argument))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([fn(argument) for _ in range(_REPEATS)])
        times.append((time.perf_counter() - start) / _REPEATS)
    return statistics.median(times)
