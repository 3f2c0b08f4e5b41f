"""The largest value of each row, and the largest with Gumbel noise: a token of its distribution."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, UInt


def largest_of(values: Float[Array, "rows n"]) -> Int[Array, " rows"]:
    """The first place of each row's largest value."""

    def twice(values: Array) -> Array:  # a CPU reduces numbers faster than pairs
        last = values.shape[-1] - 1
        places = jnp.arange(last + 1, dtype=jnp.int32)
        at_top = values == jnp.max(values, axis=-1, keepdims=True)
        return jnp.min(jnp.where(at_top, places, last), axis=-1)

    def once(values: Array) -> Array:
        return lax.argmax(values, axis=1, index_dtype=jnp.int32)

    return lax.platform_dependent(values, cpu=twice, default=once)


def draw(
    logits: Float[Array, "rows vocab"], seed: UInt[Array, "rows 2"], generated: Int[Array, " rows"]
) -> Int[Array, " rows"]:
    """A token of each row's distribution, by the Gumbel-max method; the noise is a function of the
    row's seed and of how many tokens it has generated.

    Threefry gives two words at once, and computing them takes longer than reading logits: they go
    to two tokens, one in each half of the vocabulary.
    """
    vocab = logits.shape[-1]
    half = -(-vocab // 2)
    counters = jnp.concatenate([jnp.zeros(half, jnp.uint32), jnp.arange(half, dtype=jnp.uint32)])

    def noise(words: UInt[Array, " 2"], count: Int[Array, ""]) -> Float[Array, " twice"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), count)
        first, second = jax.random.key_data(key)
        return _gumbel(threefry_2x32((first, second), counters))

    noisy = jnp.pad(logits, ((0, 0), (0, 2 * half - vocab)), constant_values=-jnp.inf)
    noisy += jax.vmap(noise)(seed, generated)
    low, high = noisy[:, :half], noisy[:, half:]
    at = largest_of(jnp.maximum(low, high))
    rows = jnp.arange(logits.shape[0])
    return at + jnp.where(high[rows, at] > low[rows, at], half, 0)


def _gumbel(words: UInt[Array, "..."]) -> Float[Array, "..."]:
    """From 23 of 32 random bits each."""
    unit = lax.bitcast_convert_type((words >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(unit, jnp.finfo(jnp.float32).tiny)))
