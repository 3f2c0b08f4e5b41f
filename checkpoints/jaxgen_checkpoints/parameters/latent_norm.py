"""The norms of latent attention: over the token's latent and over the queries' own."""

from typing import cast

from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameters.latent import LatentShape
from jaxgen_checkpoints.parameters.norm import Norm


class LatentNorm(Norm):
    """weight [latent]."""

    def width(self, model: ModelShape) -> int:
        return cast(LatentShape, model).latent_dim


class QueryLatentNorm(Norm):
    """weight [q_rank]."""

    def width(self, model: ModelShape) -> int:
        return cast(LatentShape, model).q_rank
