"""Attention sinks: one logit per query head that joins its softmax and has no value."""

from collections.abc import Mapping

import numpy as np

from jaxgen_checkpoints.heads import HeadLayout
from jaxgen_checkpoints.lazy import LazyTensor
from jaxgen_checkpoints.mesh_layout import MeshLayout
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter import Parameter, Tensor


class Sinks(Parameter):
    """[kv_slots * group], in the order of the placed query heads; no head gives zero."""

    sinks: Tensor
    axes = ("kv_heads",)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"sinks": (model.heads,)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.sinks

    def placement(self, model: ModelShape, mesh: MeshLayout) -> Mapping[int, np.ndarray]:
        shards = mesh.shards("kv_heads")
        if shards == 1:
            return {}
        return {0: HeadLayout(int(model.heads), int(model.kv_heads), shards).query_rows()}
