"""GPT-2: token plus position embeddings, then pre-norm blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Array, Float, Int

from jaxgen_models.decoder import Decoder
from jaxgen_models.gpt2.config import GPT2Config
from jaxgen_models.layers.layer_norm import LayerNorm
from jaxgen_models.layers.position_embedding import PositionEmbedding
from jaxgen_models.layers.sequential_block import SequentialBlock
from pallas_kernels.pages import TokenPlaces


class GPT2LMHeadModel(Decoder):
    """weights: as Decoder's, and "positions" [positions, model]."""

    block = SequentialBlock
    norm_kind = LayerNorm

    def __init__(
        self,
        config: GPT2Config,
        weights: Mapping[str, Any],
        group: int,
        cache_groups: Sequence[int],
    ) -> None:
        super().__init__(config, weights, group, cache_groups)
        self.positions = PositionEmbedding(weights["positions"], config.position_offset)

    def embed_tokens(
        self, token_ids: Int[Array, " tokens"], places: TokenPlaces
    ) -> Float[Array, "tokens model"]:
        return self.embed(token_ids) + self.positions(places.position)
