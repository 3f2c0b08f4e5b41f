"""The largest values of long rows, such as logits, without sorting the rows."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_BLOCK = 128
"""Values that are looked at as one at first."""


def top_k(
    values: Float[Array, "rows n"], count: int
) -> tuple[Float[Array, "rows count"], Int[Array, "rows count"]]:
    """As `lax.top_k`: the largest of each row and their places, equal ones by place; count <= n.

    XLA sorts whole rows for that. But the `count` blocks that come first by their own largest value
    hold them all: whatever block comes before another has a value that comes before all of the
    other's. So a row is read once, and what is sorted is short.
    """
    n = values.shape[-1]
    if n <= count * _BLOCK:
        return lax.top_k(values, count)
    blocks = -(-n // _BLOCK)
    padded = jnp.pad(values, ((0, 0), (0, blocks * _BLOCK - n)), constant_values=-jnp.inf)
    cut = padded.reshape(-1, blocks, _BLOCK)
    _, first = lax.top_k(cut.max(axis=-1), count)
    chosen = jnp.sort(first, axis=-1)  # so that candidates are in order of their places
    candidates = jnp.take_along_axis(cut, chosen[:, :, None], axis=1)
    top, at = lax.top_k(candidates.reshape(-1, count * _BLOCK), count)
    places = jnp.take_along_axis(chosen, at // _BLOCK, axis=-1) * _BLOCK + at % _BLOCK
    return top, places
