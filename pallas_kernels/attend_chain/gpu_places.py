"""What a step's one token attends, piece by piece: all that its layers' kernels ask, in one array.

XLA computes it once for the layers that have the same window.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.pages import RaggedRows

BLOCK = 64  # KV tokens that are attended at a time
IN_FLIGHT = 2  # blocks of keys and values
_WHOLE = 4  # blocks that one block of threads attends sooner than several join their pieces
_LEAST = 2  # blocks of a piece


class Place(NamedTuple):
    """A piece of what the token sees, in numbers that are not negative.

    position, valid: of the token; page, offset: where its key and value go; pieces: into how many
    its context is cut. first, last: the piece's blocks, of which those past the last piece have
    none; near, next: the pages of its first two.
    """

    position: Any
    valid: Any
    page: Any
    offset: Any
    pieces: Any
    first: Any
    last: Any
    near: Any
    next: Any


def places_of(
    rows: RaggedRows, *, pieces: int, page_size: int, num_pages: int, window: int | None
) -> Int[Array, "pieces 9"]:
    """A Place for each of so many pieces, or as many as are worth it."""
    (position,), (valid,) = (getattr(rows.token_places(1), name) for name in ("position", "valid"))
    (page,), (offset,) = rows.token_slots(1, page_size=page_size, num_pages=num_pages)
    first = jnp.zeros_like(position)
    if window is not None:
        first = jnp.maximum(position + 1 - window, 0) // BLOCK
    seen = (position + BLOCK - 1) // BLOCK - first
    cuts = jnp.where(seen <= _WHOLE, 1, jnp.minimum((seen + _LEAST - 1) // _LEAST, pieces))
    number = jnp.minimum(jnp.arange(pieces + 1, dtype=jnp.int32), cuts)
    begins = first + number * seen // cuts

    def page_of(block: Array) -> Array:
        return rows.block_table[0].at[block * BLOCK // page_size].get(mode="clip")

    begin, end = begins[:-1], begins[1:]
    near, following = page_of(begin), page_of(begin + 1)
    columns = Place(position, valid, page, offset, cuts, begin, end, near, following)
    wide = [jnp.broadcast_to(each, begin.shape).astype(jnp.int32) for each in columns]
    return jnp.stack(wide, axis=1)
