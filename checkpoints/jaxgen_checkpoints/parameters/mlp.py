"""Dense feed-forward weights: gate and up as one weight, plain up, and down."""

from collections.abc import Mapping

from jaxgen_checkpoints.lazy import LazyTensor, stack
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter import Parameter, Tensor


class _GateUp(Parameter):
    """[2, ffn, model], gate then up; a bias [2, ffn]."""

    axes = (None, "ffn", None)

    def inputs(self, model: ModelShape) -> tuple[int, ...]:
        """The axes behind the rows: what a weight multiplies, nothing for a bias."""
        return (model.model_dim,)


class _GateUpBias(_GateUp):
    axes = (None, "ffn")

    def inputs(self, model: ModelShape) -> tuple[int, ...]:
        return ()


class GatedMLP(_GateUp):
    """gate and up [ffn, model]."""

    gate: Tensor
    up: Tensor

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        shape = (model.ffn_dim, *self.inputs(model))
        return {"gate": shape, "up": shape}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return stack(0, [self.gate, self.up])


class FusedGatedMLP(_GateUp):
    """gate_up [2 * ffn, model]: all gate rows, then all up rows."""

    gate_up: Tensor

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"gate_up": (2 * model.ffn_dim, *self.inputs(model))}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.gate_up.split(0, (2, model.ffn_dim))


class GatedMLPBias(_GateUpBias, GatedMLP):
    """gate and up [ffn]."""


class FusedGatedMLPBias(_GateUpBias, FusedGatedMLP):
    """gate_up [2 * ffn]."""


class MLP1(Parameter):
    """Up projection of an MLP without a gate: [ffn, model]."""

    weight: Tensor
    axes = ("ffn", None)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (model.ffn_dim, model.model_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.weight


class MLP1Bias(Parameter):
    """[ffn]."""

    bias: Tensor
    axes = ("ffn",)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"bias": (model.ffn_dim,)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.bias


class MLP2(Parameter):
    """Down projection: [model, ffn]."""

    weight: Tensor
    axes = (None, "ffn")

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (model.model_dim, model.ffn_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.weight


class MLP2Bias(Parameter):
    """[model], added once after the shards' sum."""

    bias: Tensor
    axes = (None,)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"bias": (model.model_dim,)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.bias
