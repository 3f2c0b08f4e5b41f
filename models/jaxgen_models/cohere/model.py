"""Cohere: parallel blocks with a gated MLP, scaled logits."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from flax import nnx
from jaxtyping import Array, Float

from jaxgen_models.cohere.config import CohereConfig
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder import Decoder
from jaxgen_models.layers.attention import Attention
from jaxgen_models.layers.layer_norm import LayerNorm
from jaxgen_models.layers.mlp import GatedMLP
from jaxgen_models.layers.parallel_block import ParallelBlock


class CohereAttention(Attention):
    """Where heads are normalised, each has a weight of its own."""

    norm_kind = LayerNorm


class CohereBlock(ParallelBlock):
    """x + attention(norm(x)) + mlp(norm(x)), by one norm."""

    attention_kind = CohereAttention

    def make_mlp(self, config: DecoderConfig, index: int, weights: Mapping[str, Any]) -> nnx.Module:
        del index
        return GatedMLP(weights, config.activation)


class CohereForCausalLM(Decoder):
    """A decoder of CohereBlocks."""

    block = CohereBlock
    norm_kind = LayerNorm

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Any],
        group: int,
        cache_groups: Sequence[int],
    ) -> None:
        super().__init__(config, weights, group, cache_groups)
        self.logit_scale = cast(CohereConfig, config).logit_scale

    def logits(self, x: Float[Array, "rows model"]) -> Float[Array, "rows padded_vocab"]:
        """float32 logits, scaled."""
        return super().logits(x) * self.logit_scale
