"""Weights stored [in, out], as GPT-2's Conv1D layers hold them: transposed as they are read."""

from collections.abc import Mapping
from typing import ClassVar

from jaxgen_checkpoints.lazy import LazyTensor
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter import Parameter
from jaxgen_checkpoints.parameters.attention_output import AttentionOutput
from jaxgen_checkpoints.parameters.mlp import MLP1, MLP2
from jaxgen_checkpoints.parameters.qkv import FusedQKV


class _InOut(Parameter):
    """`usual` with each of its tensors stored the other way round."""

    usual: ClassVar[type[Parameter]]

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        return {name: shape[::-1] for name, shape in super().expected(model).items()}

    def canonical(self, model: ModelShape) -> LazyTensor:
        turned = self.usual(model)
        for name in self.dependencies:
            turned.set(name, getattr(self, name).transpose(1, 0))
        return turned.canonical(model)


class InOutQKV(_InOut, FusedQKV):
    """qkv [model, (heads + 2 * kv_heads) * head]: all queries, all keys, all values."""

    usual = FusedQKV


class InOutAttentionOutput(_InOut, AttentionOutput):
    """weight [heads * head, model]."""

    usual = AttentionOutput


class InOutMLP1(_InOut, MLP1):
    """weight [model, ffn]."""

    usual = MLP1


class InOutMLP2(_InOut, MLP2):
    """weight [ffn, model]."""

    usual = MLP2
