"""Cutting a distribution's tail without sorting: the smallest kept value is found digit by digit.

Float32 order is the order of (suitably flipped) bit patterns, so eleven octal digits are the
exact k-th value, or the one down to which the mass reaches p. Each digit takes one pass over the
logits. Values equal to the smallest kept one all stay.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

_DIGIT = 3
"""Bits that are found in one pass: reading the logits takes longer than comparing seven times.
XLA would read them twice for fifteen."""

_DIGITS = -(-32 // _DIGIT)


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

    def next_digit(step: int, threshold: UInt[Array, " rows"]) -> UInt[Array, " rows"]:
        place = (_DIGITS - 1 - jnp.uint32(step)) * _DIGIT
        # What holds from a threshold on holds from every lower one: the digit is how many hold.
        # The first digit has two bits: larger ones would be shifted out, to thresholds of before.
        digits = [jnp.uint32(digit) for digit in range(1, 2**_DIGIT)]
        holds = [
            enough(ranks >= (threshold | (digit << place))[:, None])
            & ((digit << place) >> place == digit)
            for digit in digits
        ]
        return threshold | (jnp.sum(jnp.stack(holds), axis=0, dtype=jnp.uint32) << place)

    threshold = lax.fori_loop(0, _DIGITS, next_digit, jnp.zeros_like(ranks[:, 0]))
    return jnp.where(ranks >= threshold[:, None], logits, -jnp.inf)


def _ordered_bits(values: Float[Array, "rows vocab"]) -> UInt[Array, "rows vocab"]:
    """Unsigned integers in the order of the floats; both zeros get the same one."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))
