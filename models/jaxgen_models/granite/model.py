"""Granite: the pre-norm decoder with multipliers at four places."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Array, Float, Int

from jaxgen_models.decoder import Decoder, DecoderBlock
from jaxgen_models.granite.config import GraniteConfig
from jaxgen_models.layers.rotary import Rotary
from pallas_kernels.pages import KVPages, RaggedRows, TokenPlaces


class GraniteBlock(DecoderBlock):
    """What a branch adds to the residual stream is multiplied first."""

    def __init__(
        self, config: GraniteConfig, index: int, weights: Mapping[str, Any], group: int
    ) -> None:
        super().__init__(config, index, weights, group)
        self.multiplier = config.residual_multiplier

    def __call__(
        self,
        x: Float[Array, "tokens model"],
        rotary: Rotary | None,
        pages: KVPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens model"], KVPages]:
        attended, pages = self.attention(self.attention_norm(x), rotary, pages, rows)
        x = x + attended * self.multiplier
        return x + self.mlp(self.mlp_norm(x)) * self.multiplier, pages


class GraniteForCausalLM(Decoder):
    """A decoder of GraniteBlocks with scaled ends."""

    block = GraniteBlock

    def __init__(
        self,
        config: GraniteConfig,
        weights: Mapping[str, Any],
        group: int,
        cache_groups: Sequence[int],
    ) -> None:
        super().__init__(config, weights, group, cache_groups)
        self.embedding_multiplier = config.embedding_multiplier
        self.logits_scaling = config.logits_scaling

    def embed_tokens(
        self, token_ids: Int[Array, " tokens"], places: TokenPlaces
    ) -> Float[Array, "tokens model"]:
        """The embedding, multiplied."""
        return super().embed_tokens(token_ids, places) * self.embedding_multiplier

    def logits(self, x: Float[Array, "rows model"]) -> Float[Array, "rows padded_vocab"]:
        """float32 logits, divided."""
        return super().logits(x) / self.logits_scaling
