"""Mixtures of experts: the router, and all experts of a layer stacked into one weight each."""

from collections.abc import Mapping
from typing import cast

from jaxgen_checkpoints.lazy import LazyTensor, stack
from jaxgen_checkpoints.model_shape import ModelShape, MoEShape
from jaxgen_checkpoints.parameter import Parameter, Tensor
from jaxgen_checkpoints.parameter_list import ParameterList


class PerExpert(ParameterList):
    """One tensor per routed expert."""

    count_attr = "num_experts"


class Router(Parameter):
    """[experts, model], the same on every device."""

    weight: Tensor
    axes = (None, None)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (_moe(model).num_experts, model.model_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.weight


class _StackedGateUp(Parameter):
    """[experts, 2, ffn, model], gate then up."""

    axes = ("experts", None, "expert_ffn", None)


class GatedExperts(_StackedGateUp):
    """Per expert gate and up [ffn, model]."""

    gate: PerExpert
    up: PerExpert

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        shape = (_moe(model).expert_ffn_dim, model.model_dim)
        return {"gate": shape, "up": shape}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return stack(0, [stack(0, pair) for pair in zip(self.gate, self.up, strict=True)])


class FusedGatedExperts(_StackedGateUp):
    """Per expert gate_up [2 * ffn, model]: all gate rows, then all up rows."""

    gate_up: PerExpert

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"gate_up": (2 * _moe(model).expert_ffn_dim, model.model_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return stack(0, list(self.gate_up)).split(1, (2, _moe(model).expert_ffn_dim))


class StackedGatedExperts(_StackedGateUp):
    """One tensor gate_up [experts, 2 * ffn, model]."""

    gate_up: Tensor

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {
            "gate_up": (_moe(model).num_experts, 2 * _moe(model).expert_ffn_dim, model.model_dim)
        }

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.gate_up.split(1, (2, _moe(model).expert_ffn_dim))


class ExpertsDown(Parameter):
    """[experts, model, ffn] from per expert [model, ffn]."""

    down: PerExpert
    axes = ("experts", None, "expert_ffn")

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"down": (model.model_dim, _moe(model).expert_ffn_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return stack(0, list(self.down))


class StackedExpertsDown(Parameter):
    """[experts, model, ffn] from one tensor of that shape."""

    down: Tensor
    axes = ("experts", None, "expert_ffn")

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"down": (_moe(model).num_experts, model.model_dim, _moe(model).expert_ffn_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.down


def _moe(model: ModelShape) -> MoEShape:
    """A container with experts is only ever made for a model that has their sizes."""
    return cast(MoEShape, model)
