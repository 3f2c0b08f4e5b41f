"""Weights and biases of norms: one number per channel, never divided over devices."""

from collections.abc import Mapping

from jaxgen_checkpoints.lazy import LazyTensor
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter import Parameter, Tensor


class Norm(Parameter):
    """weight [model]."""

    weight: Tensor
    axes = (None,)

    def width(self, model: ModelShape) -> int:
        """How many channels it normalises."""
        return model.model_dim

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self.width(model),)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.weight


class NormBias(Parameter):
    """bias [model]."""

    bias: Tensor
    axes = (None,)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"bias": (model.model_dim,)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.bias


class HeadNorm(Norm):
    """weight [head]: one for all heads of a layer, as for normalised queries and keys."""

    def width(self, model: ModelShape) -> int:
        return model.head_dim
