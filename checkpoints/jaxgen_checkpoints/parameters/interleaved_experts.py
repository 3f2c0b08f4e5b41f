"""Experts stored [experts, in, out], with gate and up in alternating columns, and their biases."""

from collections.abc import Mapping
from typing import cast

from jaxgen_checkpoints.lazy import LazyTensor
from jaxgen_checkpoints.model_shape import ModelShape, MoEShape
from jaxgen_checkpoints.parameter import Parameter, Tensor


class InterleavedGatedExperts(Parameter):
    """[experts, 2, ffn, model] from gate_up [experts, model, 2 * ffn]: gate, up, gate, up ..."""

    gate_up: Tensor
    axes = ("experts", None, "expert_ffn", None)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        shape = _moe(model)
        return {"gate_up": (shape.num_experts, shape.model_dim, 2 * shape.expert_ffn_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        pairs = self.gate_up.split(2, (_moe(model).expert_ffn_dim, 2))
        return pairs.transpose(0, 3, 2, 1)


class InterleavedGatedExpertsBias(Parameter):
    """[experts, 2, ffn] from gate_up [experts, 2 * ffn]."""

    gate_up: Tensor
    axes = ("experts", None, "expert_ffn")

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"gate_up": (_moe(model).num_experts, 2 * _moe(model).expert_ffn_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.gate_up.split(1, (_moe(model).expert_ffn_dim, 2)).transpose(0, 2, 1)


class TransposedExpertsDown(Parameter):
    """[experts, model, ffn] from down [experts, ffn, model]."""

    down: Tensor
    axes = ("experts", None, "expert_ffn")

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        shape = _moe(model)
        return {"down": (shape.num_experts, shape.expert_ffn_dim, shape.model_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.down.transpose(0, 2, 1)


class ExpertsDownBias(Parameter):
    """[experts, model], the same on every device: it is added once, after all shards' sum."""

    down: Tensor
    axes = (None, None)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"down": (_moe(model).num_experts, model.model_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.down


def _moe(model: ModelShape) -> MoEShape:
    """A container with experts is only ever made for a model that has their sizes."""
    return cast(MoEShape, model)
