"""The meaning of ragged attention, said plainly: one token at a time over its whole context."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.ragged_attention.checks import AttentionProblem


def unsupported(problem: AttentionProblem) -> str | None:
    """The reference serves everything."""
    del problem
    return None


def run(
    q: Float[Array, "tokens heads head"],
    k_new: Float[Array, "tokens kv_heads head"],
    v_new: Float[Array, "tokens kv_heads head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, "heads ..."] | None,
) -> tuple[Float[Array, "tokens heads head"], KVPages]:
    """As ragged_attention; all arithmetic in float32 (float64 for float64 inputs)."""
    pages = pages.write(k_new, v_new, rows)
    places = rows.token_places(q.shape[0])
    exact = jnp.promote_types(q.dtype, jnp.float32)

    def one_token(token: tuple[Array, Array, Array, Array]) -> Array:
        query, row, position, valid = token
        keys, values = pages.read(rows.block_table[row])
        key_position = jnp.arange(keys.shape[1])
        seen = (key_position <= position) & valid
        if window is not None:
            seen &= key_position > position - window
        # What lies behind unowned table entries may be anything, NaN included.
        keys = jnp.where(seen[:, None], keys, 0).astype(exact)
        values = jnp.where(seen[:, None], values, 0).astype(exact)

        group = query.shape[0] // keys.shape[0]
        keys, values = (jnp.repeat(each, group, axis=0) for each in (keys, values))
        query = query.astype(exact)
        scores = scale * jnp.einsum("hd,hsd->hs", query, keys, precision="highest")
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if alibi is not None and alibi.ndim == 1:
            scores += alibi[:, None].astype(exact) * (key_position - position)
        elif alibi is not None:
            scores += alibi[:, : key_position.size].astype(exact)
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:
            scores = jnp.concatenate([scores, sinks[:, None].astype(exact)], axis=1)
        weights = jax.nn.softmax(scores, axis=1)[:, : key_position.size]
        out = jnp.einsum("hs,hsd->hd", weights, values, precision="highest")
        return jnp.where(valid, out, 0).astype(query.dtype)

    out = jax.lax.map(one_token, (q, places.row, places.position, places.valid))
    return out.astype(q.dtype), pages
