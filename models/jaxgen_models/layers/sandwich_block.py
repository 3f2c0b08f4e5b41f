"""The block with a norm before and behind each of its two parts."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from jaxgen_models.config import DecoderConfig
from jaxgen_models.layers.block import Block
from jaxgen_models.layers.rotary import Rotary
from pallas_kernels.pages import KVPages, RaggedRows


class SandwichBlock(Block):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): four norms."""

    def __init__(
        self, config: DecoderConfig, index: int, weights: Mapping[str, Any], group: int
    ) -> None:
        super().__init__(config, index, weights, group)
        self.attention_norm = self.make_norm(config, weights, "attention_norm")
        self.attended_norm = self.make_norm(config, weights, "attended_norm")
        self.mlp_norm = self.make_norm(config, weights, "mlp_norm")
        self.fed_norm = self.make_norm(config, weights, "fed_norm")

    def __call__(
        self,
        x: Float[Array, "tokens model"],
        rotary: Rotary | None,
        pages: KVPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens model"], KVPages]:
        attended, pages = self.attention(self.attention_norm(x), rotary, pages, rows)
        x = x + self.attended_norm(attended)
        return x + self.fed_norm(self.mlp(self.mlp_norm(x))), pages
