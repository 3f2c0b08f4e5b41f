"""Phi: parallel blocks with LayerNorms and an MLP without a gate."""

from jaxgen_models.decoder import Decoder
from jaxgen_models.layers.attention import Attention
from jaxgen_models.layers.layer_norm import LayerNorm
from jaxgen_models.layers.parallel_block import ParallelBlock


class PhiAttention(Attention):
    """Where heads are normalised, all have the same weight and bias."""

    norm_kind = LayerNorm


class PhiBlock(ParallelBlock):
    """x + attention(norm(x)) + mlp(norm(x)), by one norm."""

    attention_kind = PhiAttention


class PhiForCausalLM(Decoder):
    """A decoder of PhiBlocks whose head has a bias."""

    block = PhiBlock
    norm_kind = LayerNorm
