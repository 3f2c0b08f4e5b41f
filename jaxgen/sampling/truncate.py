"""Cutting a distribution's tail without sorting: the smallest kept value is found bit by bit.

Float32 order is the order of (suitably flipped) bit patterns, so 32 halvings find the exact k-th
value, or the one down to which the mass reaches p. Values equal to the smallest kept one all stay.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt


def keep_min_p(
    logits: Float[Array, "rows vocab"], min_p: Float[Array, " rows"]
) -> Float[Array, "rows vocab"]:
    """Forbid tokens less likely than `min_p` times the likeliest one; 0 keeps all."""
    lowest = jnp.max(logits, axis=-1) + jnp.log(min_p)
    return jnp.where(logits >= lowest[:, None], logits, -jnp.inf)


def keep_top_k(
    logits: Float[Array, "rows vocab"], top_k: Int[Array, " rows"]
) -> Float[Array, "rows vocab"]:
    """Forbid tokens below the `top_k`-th largest logit; 0 keeps all."""
    vocab = logits.shape[-1]
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)

    def enough(above: Bool[Array, "rows vocab"]) -> Bool[Array, " rows"]:
        return jnp.sum(above, axis=-1, dtype=jnp.int32) >= wanted

    return _keep(logits, enough)


def keep_top_p(
    logits: Float[Array, "rows vocab"], top_p: Float[Array, " rows"]
) -> Float[Array, "rows vocab"]:
    """Forbid all but the smallest set of likeliest tokens whose mass reaches `top_p`; 1 is off.

    The likeliest token always stays. Where rounding keeps the mass below `top_p`, all tokens stay.
    """
    mass = jax.nn.softmax(logits, axis=-1)

    def enough(above: Bool[Array, "rows vocab"]) -> Bool[Array, " rows"]:
        reached = jnp.sum(jnp.where(above, mass, 0.0), axis=-1)
        return (reached >= top_p) & (top_p < 1.0)

    return _keep(logits, enough)


def _keep(
    logits: Float[Array, "rows vocab"],
    enough: Callable[[Bool[Array, "rows vocab"]], Bool[Array, " rows"]],
) -> Float[Array, "rows vocab"]:
    """Keep the values from the largest threshold at which `enough` of them lie on or above it."""
    ranks = _ordered_bits(logits)

    def halve(step: int, threshold: UInt[Array, " rows"]) -> UInt[Array, " rows"]:
        higher = threshold | (jnp.uint32(0x80000000) >> jnp.uint32(step))
        return jnp.where(enough(ranks >= higher[:, None]), higher, threshold)

    threshold = lax.fori_loop(0, 32, halve, jnp.zeros_like(ranks[:, 0]))
    return jnp.where(ranks >= threshold[:, None], logits, -jnp.inf)


def _ordered_bits(values: Float[Array, "rows vocab"]) -> UInt[Array, "rows vocab"]:
    """Unsigned integers in the order of the floats; both zeros get the same one."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))
