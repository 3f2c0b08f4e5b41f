"""Root-mean-square normalisation over all heads of a projection, wherever its heads are."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgen_models.layers.collective import sum_shards
from jaxgen_models.layers.leaf import Leaf
from jaxgen_models.layers.norm import RMSNorm


class ProjectionRMSNorm(RMSNorm):
    """x / rms(x) * weight in float32, where rms is over the heads of all shards together.

    weight: [places, head], this shard's. Places without a head hold zeros and add nothing.
    channels: of all heads, each counted as often as it is held: a KV head that several shards
      hold a copy of is in the sum as often as in the count, so the mean is that of one copy.
    """

    def __init__(self, weight: Leaf, eps: float, channels: int) -> None:
        super().__init__(weight, eps)
        self.channels = channels

    def __call__(self, x: Float[Array, "tokens heads head"]) -> Float[Array, "tokens heads head"]:
        wide = x.astype(jnp.float32)
        total = sum_shards(jnp.sum(jnp.square(wide), axis=(-2, -1), keepdims=True))
        scale = jax.lax.rsqrt(total / self.channels + self.eps)
        return (wide * scale * self.weight[...].astype(jnp.float32)).astype(x.dtype)
