"""What rope_write means, in plain JAX: split, normalise, turn, write."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.rope_write.heads import HeadNorms, Rotation


def unsupported(problem: Any) -> str | None:  # noqa: ANN401
    """Serves everything."""
    del problem
    return None


def run(
    qkv: Float[Array, "tokens kv_heads places head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    rotation: Rotation | None,
    norms: HeadNorms | None,
) -> tuple[Float[Array, "tokens heads head"], KVPages]:
    """As rope_write."""
    q, k, v = heads_of(qkv, rotation, norms)
    return q, pages.write(k, v, rows)


def heads_of(
    qkv: Float[Array, "tokens kv_heads places head"],
    rotation: Rotation | None,
    norms: HeadNorms | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [tokens, heads, head], keys and values [tokens, kv_heads, head], as attended."""
    tokens, _, places, head_dim = qkv.shape
    q, k, v = qkv[:, :, : places - 2], qkv[:, :, places - 2], qkv[:, :, places - 1]
    q, k = q.reshape(tokens, -1, head_dim).astype(jnp.float32), k.astype(jnp.float32)
    if norms is not None:
        q = _normalised(q, norms, norms.queries)
        k = _normalised(k, norms, norms.keys)
    if rotation is not None:
        q, k = _turned(q, rotation), _turned(k, rotation)
    return q.astype(qkv.dtype), k.astype(qkv.dtype), v


def _normalised(x: jax.Array, norms: HeadNorms, weight: jax.Array) -> jax.Array:
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + norms.eps) * (weight.astype(jnp.float32) + norms.offset)


def _turned(x: jax.Array, rotation: Rotation) -> jax.Array:
    half = rotation.cos.shape[1]
    cos, sin = rotation.cos[:, None, :], rotation.sin[:, None, :]
    apart = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    beside = slice(0, half), slice(half, 2 * half)
    one, other = apart if rotation.interleaved else beside
    first, second = x[..., one], x[..., other]
    turned = x.at[..., one].set(first * cos - second * sin)
    return turned.at[..., other].set(second * cos + first * sin)
