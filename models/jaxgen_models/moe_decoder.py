"""A pre-norm decoder whose layers have experts where the config says so, a dense MLP elsewhere."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from jaxgen_models.cache import LayerPages
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder import Decoder, DecoderBlock
from jaxgen_models.layers.block import Block
from jaxgen_models.layers.chain import Call
from jaxgen_models.layers.gating import ActivatedGate, Gating
from jaxgen_models.layers.mixture_chain import (
    MixtureLink,
    can_chain_mixtures,
    mixture_link,
    run_mixtures,
)
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

    def mixture_link(self) -> MixtureLink | None:
        """Its parts, where it computes just what is said here, for layers that are chained."""
        kind = type(self)
        if (
            kind.__call__ is not DecoderBlock.__call__
            or kind.feed_forward is not MoEBlock.feed_forward
        ):
            return None
        return mixture_link(self.attention, self.attention_norm, self.mlp_norm, self.mlp)


class MoEDecoder(Decoder):
    """A decoder of such blocks."""

    block: ClassVar[type[Block]] = MoEBlock

    def _layers(
        self, x: Float[Array, "tokens model"], calls: Sequence[Call]
    ) -> tuple[list[Float[Array, "tokens model"]], list[LayerPages]]:
        """What each layer gives: chained, where there is a kernel for it, or one by one."""
        links = [
            layer.mixture_link() if isinstance(layer, MoEBlock) else None for layer in self.layers
        ]
        if can_chain_mixtures(links, x):
            return run_mixtures(links, x, calls)
        return super()._layers(x, calls)
