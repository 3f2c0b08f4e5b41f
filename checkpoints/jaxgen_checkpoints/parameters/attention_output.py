"""The projection from attention heads back to the residual stream."""

from collections.abc import Mapping

import numpy as np

from jaxgen_checkpoints.heads import HeadLayout
from jaxgen_checkpoints.lazy import LazyTensor
from jaxgen_checkpoints.mesh_layout import MeshLayout
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter import Parameter, Tensor


class AttentionOutput(Parameter):
    """[model, kv_slots * group, head] from weight [model, heads * head]; no head gives zeros."""

    weight: Tensor
    axes = (None, "kv_heads", None)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (model.model_dim, model.heads * model.head_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.weight.split(1, (model.heads, model.head_dim))

    def placement(self, model: ModelShape, mesh: MeshLayout) -> Mapping[int, np.ndarray]:
        shards = mesh.shards("kv_heads")
        if shards == 1:
            return {}
        return {1: HeadLayout(int(model.heads), int(model.kv_heads), shards).query_rows()}


class AttentionOutputBias(Parameter):
    """[model], added once after the shards' sum."""

    bias: Tensor
    axes = (None,)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"bias": (model.model_dim,)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.bias
