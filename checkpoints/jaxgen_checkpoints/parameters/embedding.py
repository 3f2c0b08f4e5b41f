"""The two ends of the vocabulary, padded so that every tensor shard holds as many rows."""

from collections.abc import Mapping

from jaxgen_checkpoints.lazy import LazyTensor
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter import Parameter, Tensor


class Embedding(Parameter):
    """[vocab, model]; rows past the vocabulary are zeros."""

    weight: Tensor
    axes = ("vocab", None)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (model.vocab_size, model.model_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.weight


class Unembedding(Embedding):
    """[vocab, model]; logits of rows past the vocabulary must be masked before sampling."""

    hint = (
        "tie_word_embeddings is false, so the head needs weights of its own; "
        "set it to true if the head shares the embedding"
    )


class UnembeddingBias(Parameter):
    """[vocab]."""

    bias: Tensor
    axes = ("vocab",)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"bias": (model.vocab_size,)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.bias
