"""The pre-norm decoder that most families are: embedding, blocks, final norm, unembedding.

Modules are built from a tree of loaded weights (or of shapes), in tree mode: no shared references,
no state that a call changes. `nnx.split` happens once; the step merges inside its trace.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxgen_models.cache import LayerPages
from jaxgen_models.config import DecoderConfig
from jaxgen_models.layers.block import Block
from jaxgen_models.layers.chain import Call, Link, can_chain, link, run_chain
from jaxgen_models.layers.embedding import Embedding, unembed
from jaxgen_models.layers.layer_norm import LayerNorm
from jaxgen_models.layers.norm import RMSNorm
from jaxgen_models.layers.rotary import Rotary, rotary
from jaxgen_models.rope_config import RopeConfig
from pallas_kernels.pages import RaggedRows, TokenPlaces

type State = Any
"""nnx.State of a layer; beartype refuses the key type in nnx's own hint."""


@functools.partial(jax.jit, static_argnums=0)
def _run(
    graph: nnx.GraphDef,
    state: State,
    x: Float[Array, "tokens model"],
    rotary: Rotary | None,
    pages: LayerPages,
    rows: RaggedRows,
) -> tuple[Float[Array, "tokens model"], LayerPages]:
    """One layer. Layers that are alike are traced once, and lowered once; XLA inlines them all."""
    return nnx.merge(graph, state)(x, rotary, pages, rows)


class DecoderBlock(Block):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: DecoderConfig, index: int, weights: Mapping[str, Any], group: int
    ) -> None:
        super().__init__(config, index, weights, group)
        self.attention_norm = self.make_norm(config, weights, "attention_norm")
        self.mlp_norm = self.make_norm(config, weights, "mlp_norm")

    def __call__(
        self,
        x: Float[Array, "tokens model"],
        rotary: Rotary | None,
        pages: LayerPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens model"], LayerPages]:
        attended, pages = self.attention(self.attention_norm(x), rotary, pages, rows)
        x = x + attended
        return x + self.feed_forward(self.mlp_norm(x), rows), pages

    def link(self) -> Link | None:
        """Its parts, where it computes just what is said here, for layers that are chained."""
        kind = type(self)
        if (
            kind.__call__ is not DecoderBlock.__call__
            or kind.feed_forward is not Block.feed_forward
        ):
            return None
        return link(self.attention, self.attention_norm, self.mlp_norm, self.mlp)


class Decoder(nnx.Module):
    """A decoder-only transformer over a ragged batch of tokens.

    weights: {"layers": [{name: array}], "embed", "norm", "unembed" unless tied, and "unembed_bias"
      where there is one}.
    group: query heads to one KV head on this mesh (HeadLayout.group).
    cache_groups: for each layer, which of the batch's row tables it reads.
    """

    block: ClassVar[type[Block]] = DecoderBlock
    norm_kind: ClassVar[type[RMSNorm] | type[LayerNorm]] = RMSNorm

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Any],
        group: int,
        cache_groups: Sequence[int],
    ) -> None:
        self.embed = Embedding(weights["embed"])
        block = self.block_kind(config)
        self.layers = nnx.List(
            [block(config, i, layer, group) for i, layer in enumerate(weights["layers"])]
        )
        self.norm = self.final_norm(config, weights)
        self.unembed = nnx.Param(weights["unembed"]) if "unembed" in weights else None
        self.unembed_bias = (
            nnx.Param(weights["unembed_bias"]) if "unembed_bias" in weights else None
        )
        self.ropes = config.layer_ropes
        self.cache_groups = tuple(cache_groups)

    def __call__(
        self,
        token_ids: Int[Array, " tokens"],
        pages: Sequence[LayerPages],
        rows: Sequence[RaggedRows],
        anchors: Int[Array, " rows"],
        watch: list[Array] | None = None,
    ) -> tuple[Float[Array, "tokens model"], list[LayerPages]]:
        """Hidden states after the final norm, and the pages with this step's keys and values.

        pages: one entry a layer. rows: one table of rows for each cache group; they differ in their
        block tables only. anchors: for each row the length of its prompt (see `rotary`).
        watch: receives the embedding's output and then each block's, for `jaxgen verify`.
        """
        places = rows[0].token_places(token_ids.shape[0])
        anchored = anchors[places.row]
        rotaries = {
            rope: None if rope is None else self.rotation(rope, places.position, anchored)
            for rope in dict.fromkeys(self.ropes)
        }
        x = self.embed_tokens(token_ids, places)
        calls = [
            (rotaries[rope], layer_pages, rows[group])
            for rope, group, layer_pages in zip(self.ropes, self.cache_groups, pages, strict=True)
        ]
        seen, written = self._layers(x, calls)
        if watch is not None:
            watch.extend([x, *seen])
        return self.norm(seen[-1]), written

    def _layers(
        self, x: Float[Array, "tokens model"], calls: Sequence[Call]
    ) -> tuple[list[Float[Array, "tokens model"]], list[LayerPages]]:
        """What each layer gives: in one chain, where there is a kernel for it, or one by one."""
        links = [layer.link() if isinstance(layer, DecoderBlock) else None for layer in self.layers]
        if can_chain(links, x):
            return run_chain(links, x, calls)
        seen, written = [], []
        for layer, call in zip(self.layers, calls, strict=True):
            x, layer_pages = _run(*nnx.split(layer), x, *call)
            seen.append(x)
            written.append(layer_pages)
        return seen, written

    def rotation(
        self, rope: RopeConfig, positions: Int[Array, " tokens"], anchors: Int[Array, " tokens"]
    ) -> Rotary:
        """How tokens at these positions turn; anchors: for each the length of its prompt."""
        return rotary(rope, positions, jnp.maximum(anchors, positions + 1))

    def block_kind(self, config: DecoderConfig) -> type[Block]:
        """What its layers are; families whose config chooses override it."""
        del config
        return self.block

    def final_norm(self, config: DecoderConfig, weights: Mapping[str, Any]) -> nnx.Module:
        """What the last block's output goes through."""
        return self.norm_kind.of(weights, "norm", config.norm_eps)

    def embed_tokens(
        self, token_ids: Int[Array, " tokens"], places: TokenPlaces
    ) -> Float[Array, "tokens model"]:
        """What enters the first block; families with position tables or multipliers override it."""
        del places
        return self.embed(token_ids)

    def logits(self, x: Float[Array, "rows model"]) -> Float[Array, "rows padded_vocab"]:
        """float32 logits of hidden states; columns past the vocabulary are padding."""
        weight = self.embed.weight if self.unembed is None else self.unembed
        bias = None if self.unembed_bias is None else self.unembed_bias[...]
        return unembed(x, weight[...], bias)
