"""Learned positions: a table that is added to the token embeddings."""

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxgen_models.layers.leaf import Leaf


class PositionEmbedding(nnx.Module):
    """Row position + offset of the table [rows, model], which every shard holds whole."""

    def __init__(self, weight: Leaf, offset: int = 0) -> None:
        self.weight = nnx.Param(weight)
        self.offset = offset

    def __call__(self, positions: Int[Array, " tokens"]) -> Float[Array, "tokens model"]:
        return self.weight[...][positions + self.offset]
