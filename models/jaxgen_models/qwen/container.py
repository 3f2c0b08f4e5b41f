"""Qwen's tensors; c_attn always has a bias, everything else where no_bias is false."""

from typing import Final

from jaxgen_checkpoints.container import LayerContainer, present_if
from jaxgen_checkpoints.parameters.attention_output import AttentionOutput, AttentionOutputBias
from jaxgen_checkpoints.parameters.embedding import Embedding, Unembedding
from jaxgen_checkpoints.parameters.mlp import MLP2, GatedMLP, GatedMLPBias, MLP2Bias
from jaxgen_checkpoints.parameters.norm import Norm
from jaxgen_checkpoints.parameters.qkv import FusedQKV, FusedQKVBias


class QwenLayer(LayerContainer):
    """One pre-norm block; w2 is the gate."""

    attention_norm: Norm
    qkv: FusedQKV
    qkv_bias: FusedQKVBias
    out: AttentionOutput
    out_bias: AttentionOutputBias = present_if("output_bias")
    mlp_norm: Norm
    gate_up: GatedMLP
    gate_up_bias: GatedMLPBias = present_if("mlp_bias")
    down: MLP2
    down_bias: MLP2Bias = present_if("mlp_bias")

    PARAM_MAPPING = {
        "ln_1.weight": "attention_norm.weight",
        "attn.c_attn.weight": "qkv.qkv",
        "attn.c_attn.bias": "qkv_bias.qkv",
        "attn.c_proj.weight": "out.weight",
        "attn.c_proj.bias": "out_bias.bias",
        "ln_2.weight": "mlp_norm.weight",
        "mlp.w1.weight": "gate_up.up",
        "mlp.w1.bias": "gate_up_bias.up",
        "mlp.w2.weight": "gate_up.gate",
        "mlp.w2.bias": "gate_up_bias.gate",
        "mlp.c_proj.weight": "down.weight",
        "mlp.c_proj.bias": "down_bias.bias",
    }


class QwenEnds(LayerContainer):
    """Embedding, final norm, unembedding unless tied."""

    embed: Embedding
    norm: Norm
    unembed: Unembedding = present_if("untied")

    PARAM_MAPPING = {
        "transformer.wte.weight": "embed.weight",
        "transformer.ln_f.weight": "norm.weight",
        "lm_head.weight": "unembed.weight",
    }


# Tables and masks that follow from the config.
UNMAPPED: Final = [
    "transformer.rotary_emb.inv_freq",
    "transformer.h.*.attn.rotary_emb.inv_freq",
    "transformer.h.*.attn.logn_tensor",
    "transformer.h.*.attn.masked_bias",
]
