"""The expert that every token visits: a gated MLP of a width of its own, and what gates it."""

from collections.abc import Mapping
from typing import Protocol, cast

from jaxgen_checkpoints.lazy import LazyTensor
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter import Parameter, Tensor
from jaxgen_checkpoints.parameters.mlp import MLP2, GatedMLP


class SharedExpertShape(ModelShape, Protocol):
    """Sizes of a model with a shared expert."""

    @property
    def shared_ffn_dim(self) -> int:
        """Width of the shared expert's hidden layer."""
        ...


class SharedExpertGateUp(GatedMLP):
    """[2, ffn, model] from gate and up [ffn, model]."""

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        shape = (_width(model), *self.inputs(model))
        return {"gate": shape, "up": shape}


class SharedExpertDown(MLP2):
    """[model, ffn]."""

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (model.model_dim, _width(model))}


class SharedExpertGate(Parameter):
    """[1, model]: one number a token, by which the shared expert's output is multiplied."""

    weight: Tensor
    axes = (None, None)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (1, model.model_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.weight


def _width(model: ModelShape) -> int:
    """A container with a shared expert is only ever made for a model that has its width."""
    return cast(SharedExpertShape, model).shared_ffn_dim
