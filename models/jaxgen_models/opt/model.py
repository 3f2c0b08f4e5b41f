"""OPT: blocks with norms before or behind their parts, between embeddings that may be narrower."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder import Decoder
from jaxgen_models.layers.block import Block
from jaxgen_models.layers.layer_norm import LayerNorm
from jaxgen_models.layers.linear import project
from jaxgen_models.layers.position_embedding import PositionEmbedding
from jaxgen_models.layers.rotary import Rotary
from jaxgen_models.layers.sequential_block import SequentialBlock
from jaxgen_models.opt.config import OPTConfig
from pallas_kernels.pages import KVPages, RaggedRows, TokenPlaces


class OPTNorm(LayerNorm):
    """A LayerNorm that has no tensors where the config says so."""

    @classmethod
    def of(cls, weights: Mapping[str, Any], name: str, eps: float) -> "OPTNorm":
        return cls(weights.get(name), weights.get(f"{name}_bias"), eps)


class PreNormBlock(SequentialBlock):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    norm_kind = OPTNorm


class PostNormBlock(SequentialBlock):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    norm_kind = OPTNorm

    def __call__(
        self,
        x: Float[Array, "tokens model"],
        rotary: Rotary | None,
        pages: KVPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens model"], KVPages]:
        attended, pages = self.attention(x, rotary, pages, rows)
        x = self.attention_norm(x + attended)
        return self.mlp_norm(x + self.mlp(x)), pages


class NoNorm(nnx.Module):
    """Hands on what comes in."""

    def __call__(self, x: Float[Array, "... model"]) -> Float[Array, "... model"]:
        return x


class OPTForCausalLM(Decoder):
    """weights: as Decoder's with embeddings [vocab, embed], "positions" [positions, model], and
    where the widths differ "project_in" [model, embed] and "project_out" [embed, model].
    """

    norm_kind = OPTNorm

    def __init__(
        self,
        config: OPTConfig,
        weights: Mapping[str, Any],
        group: int,
        cache_groups: Sequence[int],
    ) -> None:
        super().__init__(config, weights, group, cache_groups)
        self.positions = PositionEmbedding(weights["positions"], config.position_offset)
        self.project_in = nnx.Param(weights["project_in"]) if config.projected else None
        self.project_out = nnx.Param(weights["project_out"]) if config.projected else None

    def block_kind(self, config: DecoderConfig) -> type[Block]:
        return PreNormBlock if cast(OPTConfig, config).norm_before else PostNormBlock

    def final_norm(self, config: DecoderConfig, weights: Mapping[str, Any]) -> nnx.Module:
        if not cast(OPTConfig, config).last_norm:
            return NoNorm()
        return super().final_norm(config, weights)

    def embed_tokens(
        self, token_ids: Int[Array, " tokens"], places: TokenPlaces
    ) -> Float[Array, "tokens model"]:
        x = self.embed(token_ids)
        if self.project_in is not None:
            x = project(x, self.project_in[...])
        return x + self.positions(places.position)

    def logits(self, x: Float[Array, "rows model"]) -> Float[Array, "rows padded_vocab"]:
        return super().logits(x if self.project_out is None else project(x, self.project_out[...]))
