"""Token embedding and unembedding, each split over the vocabulary."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxgen_models.layers.collective import TENSOR_AXIS, gather_last_axis, sum_shards
from jaxgen_models.layers.leaf import Leaf
from jaxgen_models.layers.linear import project_to_float32


class Embedding(nnx.Module):
    """Each shard looks up the ids it holds; the sum over shards is the embedding.

    weight: [vocab, model], this shard's rows. Ids outside the vocabulary give zeros.
    """

    def __init__(self, weight: Leaf) -> None:
        self.weight = nnx.Param(weight)

    def __call__(self, token_ids: Int[Array, " tokens"]) -> Float[Array, "tokens model"]:
        weight = self.weight[...]
        local = token_ids - jax.lax.axis_index(TENSOR_AXIS) * weight.shape[0]
        mine = (local >= 0) & (local < weight.shape[0])
        rows = weight[jnp.where(mine, local, 0)]
        return sum_shards(jnp.where(mine[:, None], rows, 0))


def unembed(
    x: Float[Array, "rows model"],
    weight: Float[Array, "vocab model"],
    bias: Float[Array, " vocab"] | None = None,
) -> Float[Array, "rows padded_vocab"]:
    """float32 logits over the whole vocabulary, whose last rows may be padding for the mesh."""
    local = project_to_float32(x, weight)
    if bias is not None:
        local = local + bias.astype(jnp.float32)
    return gather_last_axis(local)
