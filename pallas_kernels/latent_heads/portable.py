"""Queries and tokens for latent attention in plain JAX, which is also their meaning."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.latent_heads import LatentHeadsProblem, LatentNorm
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows
from pallas_kernels.per_head import per_head
from pallas_kernels.rope_write.heads import Rotation


def unsupported(problem: LatentHeadsProblem) -> str | None:
    """The portable implementation serves everything."""
    del problem
    return None


def run(
    queries: Float[Array, "tokens queries"],
    token: Float[Array, "tokens token"],
    up: Float[Array, "heads channels latent"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    plain: int,
    norm: LatentNorm,
    rotation: Rotation,
) -> tuple[Float[Array, "tokens heads width"], LatentPages]:
    """As latent_heads."""
    heads, _, latent = up.shape
    rotated = 2 * rotation.cos.shape[-1]
    count = queries.shape[0]
    q = queries[:, : heads * (plain + rotated)].reshape(count, heads, plain + rotated)
    latents, key = token[:, -latent - rotated : -rotated], token[:, None, -rotated:]
    absorbed = per_head("thn,hnl->thl", q[..., :plain], up[:, :plain])
    turning = _turned(q[..., plain:], rotation)
    new = jnp.concatenate([_normalised(latents, norm), _turned(key, rotation)[:, 0]], axis=-1)
    return jnp.concatenate([absorbed, turning], axis=-1), pages.write(new, rows)


def _normalised(x: Float[Array, "tokens latent"], norm: LatentNorm) -> Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + norm.eps)).astype(x.dtype) * norm.weight


def _turned(x: Float[Array, "tokens heads rotated"], rotation: Rotation) -> Array:
    half = rotation.cos.shape[1]
    cos, sin = (each[:, None, :].astype(x.dtype) for each in (rotation.cos, rotation.sin))
    if not rotation.interleaved:
        first, second = x[..., :half], x[..., half:]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    pairs = x.reshape(*x.shape[:-1], half, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(x.shape)
