"""The block whose attention and MLP read the same input and are added to it together."""

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


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)), by one norm for both, or one each.

    weights: as Block's, and "attention_norm", and "mlp_norm" where the MLP has a norm of its own.
    """

    norm_kind = LayerNorm

    def __init__(
        self, config: DecoderConfig, index: int, weights: Mapping[str, Any], group: int
    ) -> None:
        super().__init__(config, index, weights, group)
        self.attention_norm = self.make_norm(config, weights, "attention_norm")
        self.mlp_norm = (
            self.make_norm(config, weights, "mlp_norm") if "mlp_norm" in weights else None
        )

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
        normed = self.attention_norm(x)
        attended, pages = self.attention(normed, rotary, pages, rows)
        return x + attended + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x)), pages
