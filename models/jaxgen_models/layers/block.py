"""What every decoder block has: attention and a feed-forward part; subclasses order the norms."""

from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from jaxgen_models.cache import LayerPages
from jaxgen_models.config import DecoderConfig
from jaxgen_models.layers.attention import Attention
from jaxgen_models.layers.layer_norm import LayerNorm
from jaxgen_models.layers.mlp import GatedMLP
from jaxgen_models.layers.norm import RMSNorm
from jaxgen_models.layers.rotary import Rotary
from pallas_kernels.pages import RaggedRows

type Norm = RMSNorm | LayerNorm


class Block(nnx.Module):
    """One layer of a decoder. A family chooses the kinds, and overrides `make_attention` and
    `make_mlp` for other parts.
    """

    attention_kind: ClassVar[type[Attention]] = Attention
    norm_kind: ClassVar[type[RMSNorm] | type[LayerNorm]] = RMSNorm

    def __init__(
        self, config: DecoderConfig, index: int, weights: Mapping[str, Any], group: int
    ) -> None:
        self.attention = self.make_attention(config, index, weights, group)
        self.mlp = self.make_mlp(config, index, weights)

    def make_attention(
        self, config: DecoderConfig, index: int, weights: Mapping[str, Any], group: int
    ) -> nnx.Module:
        """The attention of layer `index`: (x, rotary, pages, rows) -> (x, pages)."""
        return self.attention_kind(
            weights,
            group=group,
            scale=config.layer_scale(index),
            window=config.windows[index],
            norm_eps=config.norm_eps,
            soft_cap=config.attention_soft_cap,
            alibi=config.alibi,
        )

    def make_mlp(self, config: DecoderConfig, index: int, weights: Mapping[str, Any]) -> nnx.Module:
        """The feed-forward part of layer `index`: [tokens, model] -> [tokens, model]."""
        del index
        return GatedMLP(weights, config.activation)

    def feed_forward(
        self, x: Float[Array, "tokens model"], rows: RaggedRows
    ) -> Float[Array, "tokens model"]:
        """The feed-forward part's output; rows tell tokens from padding where it matters."""
        del rows
        return self.mlp(x)

    def make_norm(self, config: DecoderConfig, weights: Mapping[str, Any], name: str) -> Norm:
        """The norm whose weight has this name."""
        return self.norm_kind.of(weights, name, config.norm_eps)

    def __call__(
        self,
        x: Float[Array, "tokens model"],
        rotary: Rotary | None,
        pages: LayerPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens model"], LayerPages]:
        """The residual stream behind the layer, and its pages with the step's keys and values."""
        raise NotImplementedError(f"{type(self).__name__} does not say in which order it computes")
