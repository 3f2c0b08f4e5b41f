"""Biases of a router: one number per expert, the same on every device."""

from collections.abc import Mapping
from typing import cast

import numpy as np

from jaxgen_checkpoints.lazy import LazyTensor
from jaxgen_checkpoints.model_shape import ModelShape, MoEShape
from jaxgen_checkpoints.parameter import Parameter, Tensor


class RouterBias(Parameter):
    """[experts]."""

    bias: Tensor
    axes = (None,)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {"bias": (cast(MoEShape, model).num_experts,)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.bias


class ChoiceBias(RouterBias):
    """[experts], kept in float32: a narrow type would change which experts are chosen."""

    kept = np.dtype(np.float32)
