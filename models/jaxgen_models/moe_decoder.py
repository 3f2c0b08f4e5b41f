"""A pre-norm decoder whose layers have experts where the config says so, a dense MLP elsewhere."""

from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder import Decoder, DecoderBlock
from jaxgen_models.layers.block import Block
from jaxgen_models.layers.gating import ActivatedGate, Gating
from jaxgen_models.layers.moe import MoE
from jaxgen_models.moe_config import MoEConfig
from pallas_kernels.pages import RaggedRows


class MoEBlock(DecoderBlock):
    """x + attention(norm(x)), then x + experts(norm(x)) or x + mlp(norm(x))."""

    def make_mlp(self, config: DecoderConfig, index: int, weights: Mapping[str, Any]) -> nnx.Module:
        assert isinstance(config, MoEConfig)
        if not config.sparse[index]:
            return super().make_mlp(config, index, weights)
        return MoE(weights, config.router, self.gating(config), config.activation)

    def gating(self, config: MoEConfig) -> Gating:
        """How gate and up of a routed expert meet."""
        return ActivatedGate(config.activation)

    def feed_forward(
        self, x: Float[Array, "tokens model"], rows: RaggedRows
    ) -> Float[Array, "tokens model"]:
        if isinstance(self.mlp, MoE):
            return self.mlp(x, rows.token_places(x.shape[0]).valid)
        return super().feed_forward(x, rows)


class MoEDecoder(Decoder):
    """A decoder of such blocks."""

    block: ClassVar[type[Block]] = MoEBlock
