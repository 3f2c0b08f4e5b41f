"""Gemma's decoder: scaled embedding, four offset norms a block, capped logits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder import Decoder
from jaxgen_models.layers.attention import Attention
from jaxgen_models.layers.norm import OffsetRMSNorm
from jaxgen_models.layers.sandwich_block import SandwichBlock
from jaxgen_models.soft_capped_config import SoftCappedConfig
from pallas_kernels.pages import TokenPlaces


class OffsetNormAttention(Attention):
    """Its query and key norms, where there are any, are offset too."""

    norm_kind = OffsetRMSNorm


class SoftCappedBlock(SandwichBlock):
    """Four offset norms; the scores' cap is the attention's business."""

    attention_kind = OffsetNormAttention
    norm_kind = OffsetRMSNorm


class SoftCappedDecoder(Decoder):
    """A decoder over a SoftCappedConfig."""

    block = SoftCappedBlock
    norm_kind = OffsetRMSNorm

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Any],
        group: int,
        cache_groups: Sequence[int],
    ) -> None:
        super().__init__(config, weights, group, cache_groups)
        self.embedding_scale = math.sqrt(config.model_dim)
        self.logit_soft_cap = cast(SoftCappedConfig, config).logit_soft_cap

    def embed_tokens(
        self, token_ids: Int[Array, " tokens"], places: TokenPlaces
    ) -> Float[Array, "tokens model"]:
        """The embedding times sqrt(model), a factor that is rounded to its dtype first."""
        x = super().embed_tokens(token_ids, places)
        return x * jnp.asarray(self.embedding_scale, x.dtype)

    def logits(self, x: Float[Array, "rows model"]) -> Float[Array, "rows padded_vocab"]:
        """float32 logits, capped where the config says so."""
        logits, cap = super().logits(x), self.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
