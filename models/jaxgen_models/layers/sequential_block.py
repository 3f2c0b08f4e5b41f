"""The block of GPT-2 and its kin: LayerNorms, attention, then an MLP without a gate."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jaxgen_models.config import DecoderConfig
from jaxgen_models.layers.block import Block
from jaxgen_models.layers.layer_norm import LayerNorm
from jaxgen_models.layers.plain_mlp import PlainMLP
from jaxgen_models.layers.rotary import Rotary
from pallas_kernels.pages import KVPages, RaggedRows


class SequentialBlock(Block):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    norm_kind = LayerNorm

    def __init__(
        self, config: DecoderConfig, index: int, weights: Mapping[str, Any], group: int
    ) -> None:
        super().__init__(config, index, weights, group)
        self.attention_norm = self.make_norm(config, weights, "attention_norm")
        self.mlp_norm = self.make_norm(config, weights, "mlp_norm")

    def make_mlp(self, config: DecoderConfig, index: int, weights: Mapping[str, Any]) -> nnx.Module:
        del index
        return PlainMLP(weights, config.activation)

    def __call__(
        self,
        x: Float[Array, "tokens model"],
        rotary: Rotary | None,
        pages: KVPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens model"], KVPages]:
        attended, pages = self.attention(self.attention_norm(x), rotary, pages, rows)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), pages
