"""The meaning of latent attention, said plainly: one token at a time over its whole context."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.latent_attention.checks import LatentProblem
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows


def unsupported(problem: LatentProblem) -> str | None:
    """The reference serves everything."""
    del problem
    return None


def run(
    q: Float[Array, "tokens heads width"],
    new: Float[Array, "tokens width"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    latent: int,
    scale: float,
) -> tuple[Float[Array, "tokens heads latent"], LatentPages]:
    """As latent_attention; all arithmetic in float32 (float64 for float64 inputs)."""
    pages = pages.write(new, rows)
    places = rows.token_places(q.shape[0])
    exact = jnp.promote_types(q.dtype, jnp.float32)

    def one_token(token: tuple[Array, Array, Array, Array]) -> Array:
        query, row, position, valid = token
        keys = pages.read(rows.block_table[row])
        seen = (jnp.arange(keys.shape[0]) <= position) & valid
        # What lies behind unowned table entries may be anything, NaN included.
        keys = jnp.where(seen[:, None], keys, 0).astype(exact)
        query = jnp.where(valid, query, 0).astype(exact)
        scores = scale * jnp.einsum("hw,sw->hs", query, keys, precision="highest")
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        out = jnp.einsum("hs,sl->hl", weights, keys[:, :latent], precision="highest")
        return jnp.where(valid, out, 0).astype(query.dtype)

    out = jax.lax.map(one_token, (q, places.row, places.position, places.valid))
    return out.astype(q.dtype), pages
