"""A decoder with latent attention in every layer and experts in most, as its policy builds it."""

from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxgen_models.cache import LatentCache, LayerCache
from jaxgen_models.config import DecoderConfig
from jaxgen_models.latent_config import LatentMoEConfig
from jaxgen_models.layers.block import Block
from jaxgen_models.layers.latent_attention import LatentAttention
from jaxgen_models.moe_decoder import MoEBlock, MoEDecoder
from jaxgen_models.policy import InferencePolicy


class LatentBlock(MoEBlock):
    """x + latent_attention(norm(x)), then the experts or the dense MLP."""

    def make_attention(
        self, config: DecoderConfig, index: int, weights: Mapping[str, Any], group: int
    ) -> nnx.Module:
        del index, group
        assert isinstance(config, LatentMoEConfig)
        return LatentAttention(weights, config)


class LatentDecoder(MoEDecoder):
    """A decoder of such blocks."""

    block: ClassVar[type[Block]] = LatentBlock


class LatentPolicy(InferencePolicy):
    """A family whose layers keep one vector a token."""

    def layer_caches(self, tensor_shards: int) -> tuple[LayerCache, ...]:
        del tensor_shards
        config = self.config
        assert isinstance(config, LatentMoEConfig)
        width = int(config.latent_dim + config.head_dim)
        return (LatentCache(width),) * int(config.num_layers)
