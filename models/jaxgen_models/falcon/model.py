"""Falcon: LayerNorm blocks, wired in parallel or in sequence."""

from typing import cast

from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder import Decoder
from jaxgen_models.falcon.config import FalconConfig
from jaxgen_models.layers.block import Block
from jaxgen_models.layers.layer_norm import LayerNorm
from jaxgen_models.layers.parallel_block import ParallelBlock
from jaxgen_models.layers.sequential_block import SequentialBlock


class FalconForCausalLM(Decoder):
    """Whether a parallel block has one norm or two shows in its weights."""

    norm_kind = LayerNorm

    def block_kind(self, config: DecoderConfig) -> type[Block]:
        return ParallelBlock if cast(FalconConfig, config).parallel else SequentialBlock
