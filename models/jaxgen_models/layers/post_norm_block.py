"""The block that normalises what it adds to the residual stream, not what it reads from it."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from jaxgen_models.config import DecoderConfig
from jaxgen_models.layers.block import Block
from jaxgen_models.layers.rotary import Rotary
from pallas_kernels.pages import KVPages, RaggedRows


class PostNormBlock(Block):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(
        self, config: DecoderConfig, index: int, weights: Mapping[str, Any], group: int
    ) -> None:
        super().__init__(config, index, weights, group)
        self.attention_norm = self.make_norm(config, weights, "attention_norm")
        self.mlp_norm = self.make_norm(config, weights, "mlp_norm")

    def __call__(
        self,
        x: Float[Array, "tokens model"],
        rotary: Rotary | None,
        pages: KVPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens model"], KVPages]:
        attended, pages = self.attention(x, rotary, pages, rows)
        x = x + self.attention_norm(attended)
        return x + self.mlp_norm(self.mlp(x)), pages
