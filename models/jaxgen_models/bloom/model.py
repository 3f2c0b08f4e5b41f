"""BLOOM: sequential LayerNorm blocks with ALiBi behind a normalised embedding."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from jaxtyping import Array, Float, Int

from jaxgen_models.bloom.config import BloomConfig
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder import Decoder
from jaxgen_models.layers.block import Block
from jaxgen_models.layers.layer_norm import LayerNorm
from jaxgen_models.layers.rotary import Rotary
from jaxgen_models.layers.sequential_block import SequentialBlock
from pallas_kernels.pages import KVPages, RaggedRows, TokenPlaces


class NormedResidualBlock(SequentialBlock):
    """The residual is the normalised input: n + attention(n) with n = norm(x), then the same of
    the MLP.
    """

    def __call__(
        self,
        x: Float[Array, "tokens model"],
        rotary: Rotary | None,
        pages: KVPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens model"], KVPages]:
        x = self.attention_norm(x)
        attended, pages = self.attention(x, rotary, pages, rows)
        x = self.mlp_norm(x + attended)
        return x + self.mlp(x), pages


class BloomForCausalLM(Decoder):
    """weights: as Decoder's, and "embed_norm" [model] with its bias."""

    norm_kind = LayerNorm

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Any],
        group: int,
        cache_groups: Sequence[int],
    ) -> None:
        super().__init__(config, weights, group, cache_groups)
        self.embed_norm = LayerNorm.of(weights, "embed_norm", config.norm_eps)

    def block_kind(self, config: DecoderConfig) -> type[Block]:
        after_norm = cast(BloomConfig, config).residual_after_norm
        return NormedResidualBlock if after_norm else SequentialBlock

    def embed_tokens(
        self, token_ids: Int[Array, " tokens"], places: TokenPlaces
    ) -> Float[Array, "tokens model"]:
        del places
        return self.embed_norm(self.embed(token_ids))
