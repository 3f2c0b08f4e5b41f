"""GPT-OSS is a pre-norm decoder with experts, whose gate is of its own kind."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgen_models.gpt_oss.config import GptOssConfig
from jaxgen_models.layers.block import Block
from jaxgen_models.layers.gating import Gating
from jaxgen_models.layers.layer_norm import LayerNorm
from jaxgen_models.layers.norm import RMSNorm, WideRMSNorm
from jaxgen_models.moe_config import MoEConfig
from jaxgen_models.moe_decoder import MoEBlock, MoEDecoder


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gate * sigmoid(alpha * gate) * (up + 1), the gate cut above limit, up on both sides."""

    alpha: float
    limit: float

    def __call__(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


class GptOssBlock(MoEBlock):
    """The block of a decoder with experts, with that gate."""

    norm_kind: ClassVar[type[RMSNorm] | type[LayerNorm]] = WideRMSNorm

    def gating(self, config: MoEConfig) -> Gating:
        assert isinstance(config, GptOssConfig)
        return ClampedGate(config.swiglu_alpha, config.swiglu_limit)


class GptOssForCausalLM(MoEDecoder):
    """Even layers look back through a window; every head has a sink."""

    block: ClassVar[type[Block]] = GptOssBlock
    norm_kind: ClassVar[type[RMSNorm] | type[LayerNorm]] = WideRMSNorm
