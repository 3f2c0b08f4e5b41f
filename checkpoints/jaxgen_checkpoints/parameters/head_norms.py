"""Norm weights with a row of their own for every head, dealt over shards as the heads are."""

from collections.abc import Mapping

import numpy as np

from jaxgen_checkpoints.heads import HeadLayout
from jaxgen_checkpoints.lazy import LazyTensor
from jaxgen_checkpoints.mesh_layout import MeshLayout
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter import Parameter, Tensor


class _HeadRows(Parameter):
    """[places, head] from weight [heads, head]; a place without a head has zeros."""

    weight: Tensor
    axes = ("kv_heads", None)

    def count(self, model: ModelShape) -> int:
        """How many heads have a row."""
        raise NotImplementedError(f"{type(self).__name__} does not say whose rows it holds")

    def rows(self, layout: HeadLayout) -> np.ndarray:
        """For each place the head that it holds, -1 for none."""
        raise NotImplementedError(f"{type(self).__name__} does not say where its rows go")

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self.count(model), model.head_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.weight

    def placement(self, model: ModelShape, mesh: MeshLayout) -> Mapping[int, np.ndarray]:
        shards = mesh.shards("kv_heads")
        if shards == 1:
            return {}
        return {0: self.rows(HeadLayout(int(model.heads), int(model.kv_heads), shards))}


class QueryHeadNorms(_HeadRows):
    """[kv_slots * group, head] from weight [heads, head]."""

    def count(self, model: ModelShape) -> int:
        return model.heads

    def rows(self, layout: HeadLayout) -> np.ndarray:
        return layout.query_rows()


class KeyHeadNorms(_HeadRows):
    """[kv_slots, head] from weight [kv_heads, head]."""

    def count(self, model: ModelShape) -> int:
        return model.kv_heads

    def rows(self, layout: HeadLayout) -> np.ndarray:
        return layout.kv_of_slot()


class _Flat(_HeadRows):
    """The same from weight [heads * head]."""

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self.count(model) * model.head_dim,)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.weight.split(0, (self.count(model), model.head_dim))


class QueryProjectionNorm(_Flat, QueryHeadNorms):
    """[kv_slots * group, head] from weight [heads * head]."""


class KeyProjectionNorm(_Flat, KeyHeadNorms):
    """[kv_slots, head] from weight [kv_heads * head]."""
