"""Embeddings of a width of their own, and the projections between it and the residual stream."""

from collections.abc import Mapping
from typing import Protocol, cast

from jaxgen_checkpoints.lazy import LazyTensor
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter import Parameter, Tensor
from jaxgen_checkpoints.parameters.embedding import Embedding, Unembedding


class EmbedShape(ModelShape, Protocol):
    """Sizes of a model whose embeddings may be narrower than its residual stream."""

    @property
    def embed_dim(self) -> int:
        """Width of the embeddings."""
        ...


class ProjectedEmbedding(Embedding):
    """[vocab, embed]."""

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (model.vocab_size, _embed_dim(model))}


class ProjectedUnembedding(ProjectedEmbedding):
    """[vocab, embed]."""

    hint = Unembedding.hint


class ProjectIn(Parameter):
    """[model, embed], the same on every device."""

    weight: Tensor
    axes = (None, None)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (model.model_dim, _embed_dim(model))}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.weight


class ProjectOut(ProjectIn):
    """[embed, model], the same on every device."""

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (_embed_dim(model), model.model_dim)}


def _embed_dim(model: ModelShape) -> int:
    """Only a model that has this width has a container with these parameters."""
    return cast(EmbedShape, model).embed_dim
