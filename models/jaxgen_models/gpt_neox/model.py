"""GPT-NeoX: LayerNorm blocks, wired in parallel or in sequence."""

from typing import cast

from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder import Decoder
from jaxgen_models.gpt_neox.config import GPTNeoXConfig
from jaxgen_models.layers.block import Block
from jaxgen_models.layers.layer_norm import LayerNorm
from jaxgen_models.layers.parallel_block import ParallelBlock
from jaxgen_models.layers.sequential_block import SequentialBlock


class GPTNeoXForCausalLM(Decoder):
    """Both wirings have the same weights: only the config tells them apart."""

    norm_kind = LayerNorm

    def block_kind(self, config: DecoderConfig) -> type[Block]:
        return ParallelBlock if cast(GPTNeoXConfig, config).parallel else SequentialBlock
