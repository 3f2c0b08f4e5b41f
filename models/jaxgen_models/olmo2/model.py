"""OLMo 2: post-norm blocks whose queries and keys are normalised as whole projections."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder import Decoder
from jaxgen_models.layers.attention import Attention
from jaxgen_models.layers.norm import WideRMSNorm
from jaxgen_models.layers.post_norm_block import PostNormBlock
from jaxgen_models.layers.projection_norm import ProjectionRMSNorm


class Olmo2Block(PostNormBlock):
    """The norm of a projection needs all its heads, those of other shards too."""

    norm_kind = WideRMSNorm

    def make_attention(
        self, config: DecoderConfig, index: int, weights: Mapping[str, Any], group: int
    ) -> nnx.Module:
        attention = super().make_attention(config, index, weights, group)
        assert isinstance(attention, Attention)
        # Over all shards: modules are made over whole weights, and merged over local ones.
        copies = weights["k_norm"].shape[0] // int(config.kv_heads)
        head, eps = int(config.head_dim), config.norm_eps
        attention.q_norm = ProjectionRMSNorm(
            weights["q_norm"], eps, channels=int(config.heads) * head
        )
        attention.k_norm = ProjectionRMSNorm(
            weights["k_norm"], eps, channels=copies * int(config.kv_heads) * head
        )
        return attention


class Olmo2ForCausalLM(Decoder):
    """A decoder of Olmo2Blocks."""

    block = Olmo2Block
    norm_kind = WideRMSNorm
