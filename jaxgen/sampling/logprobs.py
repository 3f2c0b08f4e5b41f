"""Log-probabilities as the model gave them: before bias, penalties and temperature."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxgen.sampling.branch import when
from jaxgen.sampling.long_rows import top_k
from jaxgen.sampling.params import MAX_LOGPROBS


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of given tokens, and the likeliest ones, best first (equal ones by id)."""

    chosen: Float[Array, " rows"]
    top_ids: Int[Array, "rows top"]
    top_logprobs: Float[Array, "rows top"]


def token_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"], most: int = MAX_LOGPROBS
) -> TokenLogprobs:
    """Log-probabilities of `tokens` and of the `most` likeliest; `logits` have no padded ids."""
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    top, top_ids = top_k(logits, min(most, logits.shape[-1]))
    return TokenLogprobs(chosen - total, top_ids.astype(jnp.int32), top - total[:, None])


def wanted_logprobs(
    logits: Float[Array, "rows vocab"],
    tokens: Int[Array, " rows"],
    wanted: Bool[Array, " rows"],
    known: bool | None,
) -> TokenLogprobs:
    """`token_logprobs` if any row wants them, otherwise zeros of that shape at no cost.

    known: whether any does, if the host knows; None asks `wanted` on the device.
    """
    shapes = jax.eval_shape(token_logprobs, logits, tokens)

    def nothing() -> TokenLogprobs:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return when(known, jnp.any(wanted), lambda: token_logprobs(logits, tokens), nothing)
