"""Query, key and value projections, however a checkpoint stores them, as one group-major weight.

Final layout: for each KV slot (see `HeadLayout`) its query heads, then its key head, then its
value head, so that every tensor shard holds whole heads of its own.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxgen_checkpoints.errors import MappingError
from jaxgen_checkpoints.heads import HeadLayout
from jaxgen_checkpoints.lazy import LazyTensor, concat
from jaxgen_checkpoints.mesh_layout import MeshLayout
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter import Parameter, Tensor


class _QKV(Parameter):
    """[kv_slots * (group + 2), head, model]; a subclass says where its rows are."""

    axes = ("kv_heads", None, None)

    def inputs(self, model: ModelShape) -> tuple[int, ...]:
        """The axes behind the rows: what a weight multiplies, nothing for a bias."""
        return (model.model_dim,)

    def placement(self, model: ModelShape, mesh: MeshLayout) -> Mapping[int, np.ndarray]:
        if mesh.shards("kv_heads") == 1:
            return {}
        return {0: _layout(model, mesh.shards("kv_heads")).qkv_rows()}


class UnfusedQKV(_QKV):
    """q [heads * head, model], k and v [kv_heads * head, model]."""

    q: Tensor
    k: Tensor
    v: Tensor

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        rows, kv_rows = model.heads * model.head_dim, model.kv_heads * model.head_dim
        inputs = self.inputs(model)
        return {"q": (rows, *inputs), "k": (kv_rows, *inputs), "v": (kv_rows, *inputs)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return _group_major(model, [self.q, self.k, self.v])


class FusedQKV(_QKV):
    """qkv [(heads + 2 * kv_heads) * head, model]: all query heads, all keys, all values."""

    qkv: Tensor

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"qkv": ((model.heads + 2 * model.kv_heads) * model.head_dim, *self.inputs(model))}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return _group_major(model, [self.qkv])


class FusedMQA(FusedQKV):
    """qkv [(heads + 2) * head, model]: all query heads, then the one key and the one value head."""

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        if model.kv_heads != 1:
            raise MappingError(f"FusedMQA needs a model of 1 KV head, got {model.kv_heads}")
        return {"qkv": ((model.heads + 2) * model.head_dim, *self.inputs(model))}


class GQAMegatronQKV(_QKV):
    """qkv [kv_heads * (group + 2) * head, model]: per KV head its queries, its key, its value."""

    qkv: Tensor

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"qkv": ((model.heads + 2 * model.kv_heads) * model.head_dim, *self.inputs(model))}

    def canonical(self, model: ModelShape) -> LazyTensor:
        # The final layout on one device is this very layout.
        return _by_head(self.qkv, model)


class MegatronQKV(GQAMegatronQKV):
    """qkv [heads * 3 * head, model]: per head its query, its key, its value."""

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        if model.kv_heads != model.heads:
            raise MappingError(
                f"MegatronQKV needs one KV head a head, got {model.kv_heads} for {model.heads}"
            )
        return {"qkv": (3 * model.heads * model.head_dim, *self.inputs(model))}


class _QKVBias(_QKV):
    """[kv_slots * (group + 2), head]."""

    axes = ("kv_heads", None)

    def inputs(self, model: ModelShape) -> tuple[int, ...]:
        return ()


class UnfusedQKVBias(_QKVBias, UnfusedQKV):
    """q [heads * head], k and v [kv_heads * head]."""


class FusedQKVBias(_QKVBias, FusedQKV):
    """qkv [(heads + 2 * kv_heads) * head]."""


class FusedMQABias(_QKVBias, FusedMQA):
    """qkv [(heads + 2) * head]."""


class GQAMegatronQKVBias(_QKVBias, GQAMegatronQKV):
    """qkv [kv_heads * (group + 2) * head]."""


class MegatronQKVBias(_QKVBias, MegatronQKV):
    """qkv [heads * 3 * head]."""


def _layout(model: ModelShape, shards: int) -> HeadLayout:
    return HeadLayout(int(model.heads), int(model.kv_heads), shards)


def _by_head(rows: LazyTensor, model: ModelShape) -> LazyTensor:
    return rows.split(0, (rows.shape[0] // model.head_dim, model.head_dim))


def _group_major(model: ModelShape, parts: Sequence[LazyTensor]) -> LazyTensor:
    """Reorder [all queries; all keys; all values] into group-major heads."""
    heads, kv_heads = int(model.heads), int(model.kv_heads)
    group = heads // kv_heads
    queries = np.arange(heads).reshape(kv_heads, group)
    keys = heads + np.arange(kv_heads)[:, None]
    order = np.concatenate([queries, keys, keys + kv_heads], axis=1).reshape(-1)
    return concat(0, [_by_head(part, model) for part in parts]).take(0, order)
