"""The bias of a norm over each head, one for all heads of a layer."""

from collections.abc import Mapping

from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameters.norm import NormBias


class HeadNormBias(NormBias):
    """bias [head]."""

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"bias": (model.head_dim,)}
