"""Cutting a distribution's tail without sorting: the smallest kept value is found digit by digit.

Positive floats are in the order of their bit patterns, all floats in that of suitably flipped
ones: so the digits of a pattern are the exact k-th logit, or the probability down to which the mass
reaches p. Each digit takes one pass over the values. What equals the smallest kept value stays.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

_DIGIT = 3
"""Bits that are found in one pass: on a GPU reading the values takes longer than comparing them
with seven numbers, and not longer than with fifteen. On a CPU comparing is what takes time."""

_FEW_ROWS = 16
"""Fewer rows are cut into more parts, which are added up apart, so that one row occupies a GPU too.
All sums of a pass are one small array then, where XLA would end each in a kernel of its own."""


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
    smallest = _threshold(logits, jnp.ones_like, wanted.astype(jnp.float32), bits=32)
    return jnp.where(logits >= smallest[:, None], logits, -jnp.inf)


def keep_top_p(
    logits: Float[Array, "rows vocab"], top_p: Float[Array, " rows"]
) -> Float[Array, "rows vocab"]:
    """Forbid all but the smallest set of likeliest tokens whose mass reaches `top_p`; 1 is off.

    The likeliest token always stays. Where rounding keeps the mass below `top_p`, all tokens stay.
    """
    mass = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))  # at most 1: 30 bits
    wanted = jnp.where(top_p < 1.0, top_p * jnp.sum(mass, axis=-1), jnp.inf)
    smallest = _threshold(mass, lambda mass: mass, wanted, bits=30)
    return jnp.where(mass >= smallest[:, None], logits, -jnp.inf)


def _threshold(
    values: Float[Array, "rows vocab"],
    weigh: Callable[[Array], Array],
    wanted: Float[Array, " rows"],
    *,
    bits: int,
) -> Float[Array, " rows"]:
    search = partial(smallest_kept, weigh=weigh, bits=bits)
    # Unrolled, a pass is three kernels on a GPU, and loops need two more to count. On a TPU it
    # would be three times the code, which lies in the device's memory.
    return lax.platform_dependent(
        values,
        wanted,
        cpu=partial(search, digit=1, unroll=False),
        tpu=partial(search, digit=_DIGIT, unroll=False),
        default=partial(search, digit=_DIGIT, unroll=True),
    )


def smallest_kept(
    values: Float[Array, "rows vocab"],
    wanted: Float[Array, " rows"],
    *,
    weigh: Callable[[Array], Array],
    bits: int,
    digit: int,
    unroll: bool,
) -> Float[Array, " rows"]:
    """The largest number such that the values not below it weigh what is wanted; if all of them do
    not, the least number there is.

    bits: 32, or those of the pattern of the largest of positive values. digit: bits of a pass.
    """
    rows, vocab = values.shape
    parts = 64 if rows < _FEW_ROWS else 16
    # What is added weighs something only where every value lies on or above the threshold.
    padded = jnp.pad(values, ((0, 0), (0, -vocab % parts)), constant_values=-jnp.inf)
    chunks = padded.reshape(rows, parts, -1)
    digits = jnp.arange(1, 2**digit, dtype=jnp.uint32)
    steps = -(-bits // digit)
    number = _in_order if bits == 32 else lambda pattern: lax.bitcast_convert_type(pattern, "f4")

    def next_digit(step: int, found: UInt[Array, " rows"]) -> UInt[Array, " rows"]:
        place = (steps - 1 - jnp.uint32(step)) * digit
        # The first digit may have fewer bits than the others.
        possible = digits < 1 << jnp.minimum(bits - place, digit)
        tried = number(found[:, None] | (digits << place))
        sums = [
            jnp.sum(jnp.where(chunks >= tried[:, at, None, None], weigh(chunks), 0), axis=-1)
            for at in range(digits.size)
        ]
        reached = jnp.sum(jnp.stack(sums, axis=1), axis=-1)
        # What holds from a threshold on holds from every lower one: the digit is how many hold.
        holds = (reached >= wanted[:, None]) & possible
        return found | (jnp.sum(holds, axis=-1, dtype=jnp.uint32) << place)

    return number(lax.fori_loop(0, steps, next_digit, jnp.zeros(rows, jnp.uint32), unroll=unroll))


def _in_order(number: UInt[Array, "..."]) -> Float[Array, "..."]:
    """The float of each number, in the order of floats: the negative ones come first. What would be
    no number but less than all is -inf.
    """
    number = jnp.maximum(number, jnp.uint32(0x007FFFFF))
    pattern = jnp.where(number >> 31 == 1, number & jnp.uint32(0x7FFFFFFF), ~number)
    return lax.bitcast_convert_type(pattern, jnp.float32)
