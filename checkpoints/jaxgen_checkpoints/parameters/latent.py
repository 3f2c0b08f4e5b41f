"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): what a token is projected to, and
how heads read it.

Rotated channels are stored in pairs (2i, 2i + 1); they are laid out here so that channel i turns
with channel i + half, which gives the same scores.
"""

from collections.abc import Mapping
from typing import Protocol, cast

import numpy as np

from jaxgen_checkpoints.heads import NOBODY
from jaxgen_checkpoints.lazy import LazyTensor, concat
from jaxgen_checkpoints.mesh_layout import MeshLayout
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter import Parameter, Tensor


class LatentShape(ModelShape, Protocol):
    """Sizes of a model with latent attention; `head_dim` is the rotated part of a head."""

    @property
    def q_rank(self) -> int:
        """Width of the queries' own latent, where they have one."""
        ...

    @property
    def latent_dim(self) -> int:
        """Width of the latent that keys and values are made of."""
        ...

    @property
    def plain_dim(self) -> int:
        """Channels of a head that do not rotate."""
        ...

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        ...

    @property
    def rope_interleaved(self) -> bool:
        """Whether channels 2i and 2i + 1 of the rotated part are a pair."""
        ...


class DirectLatentIn(Parameter):
    """[heads * (plain + rotated) + shards * (latent + rotated), model]: each shard's queries, then
    the token's latent and its rotated key, which every shard computes.
    """

    q: Tensor
    kv: Tensor
    axes = ("heads", None)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        shape = _latent(model)
        rows = shape.heads * (shape.plain_dim + shape.head_dim)
        kv = shape.latent_dim + shape.head_dim
        return {"q": (rows, shape.model_dim), "kv": (kv, shape.model_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        queries = _queries(self.q, model).merge(0)
        return concat(0, [queries, _rotated_last(self.kv, 0, model)])

    def placement(self, model: ModelShape, mesh: MeshLayout) -> Mapping[int, np.ndarray]:
        shards = mesh.shards("heads")
        if shards == 1:
            return {}
        shape = _latent(model)
        heads, width = int(shape.heads), int(shape.plain_dim + shape.head_dim)
        each = -(-heads // shards) * width
        queries = np.arange(shards * each).reshape(shards, each)
        queries = np.where(queries < heads * width, queries, NOBODY)
        kv = heads * width + np.arange(int(shape.latent_dim + shape.head_dim))
        kv = np.broadcast_to(kv, (shards, kv.size))
        return {0: np.concatenate([queries, kv], axis=1).reshape(-1)}


class LowRankLatentIn(Parameter):
    """[q_rank + latent + rotated, model]: the queries' latent, the token's, its rotated key."""

    q: Tensor
    kv: Tensor
    axes = (None, None)

    def inputs(self, model: ModelShape) -> tuple[int, ...]:
        """The axes behind the rows: what a weight multiplies, nothing for a bias."""
        return (model.model_dim,)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        shape, inputs = _latent(model), self.inputs(model)
        return {
            "q": (shape.q_rank, *inputs),
            "kv": (shape.latent_dim + shape.head_dim, *inputs),
        }

    def canonical(self, model: ModelShape) -> LazyTensor:
        return concat(0, [self.q, _rotated_last(self.kv, 0, model)])


class LowRankLatentInBias(LowRankLatentIn):
    """[q_rank + latent + rotated]."""

    axes = (None,)

    def inputs(self, model: ModelShape) -> tuple[int, ...]:
        return ()


class LatentInBias(Parameter):
    """[latent + rotated]: queries without a latent of their own have no bias."""

    kv: Tensor
    axes = (None,)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"kv": (_latent(model).latent_dim + model.head_dim,)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return _rotated_last(self.kv, 0, model)


class QueryUp(Parameter):
    """[heads, plain + rotated, q_rank]: from the queries' latent to each head's query."""

    weight: Tensor
    axes = ("heads", None, None)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        shape = _latent(model)
        rows = shape.heads * (shape.plain_dim + shape.head_dim)
        return {"weight": (rows, shape.q_rank)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return _queries(self.weight, model)


class LatentUp(Parameter):
    """[heads, plain + value, latent]: each head's key without the rotated part, then its value."""

    weight: Tensor
    axes = ("heads", None, None)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        shape = _latent(model)
        rows = shape.heads * (shape.plain_dim + shape.value_dim)
        return {"weight": (rows, shape.latent_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        shape = _latent(model)
        return self.weight.split(0, (shape.heads, shape.plain_dim + shape.value_dim))


class LatentOutput(Parameter):
    """[model, heads, value]."""

    weight: Tensor
    axes = (None, "heads", None)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        shape = _latent(model)
        return {"weight": (shape.model_dim, shape.heads * shape.value_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.weight.split(1, (model.heads, _latent(model).value_dim))


def _latent(model: ModelShape) -> LatentShape:
    """A container with latent attention is only ever made for a model that has its sizes."""
    return cast(LatentShape, model)


def _queries(rows: LazyTensor, model: ModelShape) -> LazyTensor:
    """[heads, plain + rotated, inputs]."""
    width = _latent(model).plain_dim + model.head_dim
    return _rotated_last(rows.split(0, (model.heads, width)), 1, model)


def _rotated_last(rows: LazyTensor, axis: int, model: ModelShape) -> LazyTensor:
    """Reorders the rotated channels, which are the last of `axis`: first of each pair, then
    second.
    """
    if not _latent(model).rope_interleaved:
        return rows
    rotated = int(model.head_dim)
    before = rows.shape[axis] - rotated
    pairs = before + np.arange(rotated).reshape(-1, 2).T.reshape(-1)
    return rows.take(axis, np.concatenate([np.arange(before), pairs]))
