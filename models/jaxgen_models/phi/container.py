"""Phi's tensors."""

from typing import Final

from jaxgen_checkpoints.container import present_if
from jaxgen_checkpoints.parameters.embedding import UnembeddingBias
from jaxgen_checkpoints.parameters.head_norm_bias import HeadNormBias
from jaxgen_checkpoints.parameters.norm import HeadNorm, NormBias
from jaxgen_checkpoints.parameters.qkv import UnfusedQKV, UnfusedQKVBias
from jaxgen_models.decoder_container import DecoderEnds
from jaxgen_models.layer_norm_container import LayerNormLayer


class PhiLayer(LayerNormLayer):
    """One norm for attention and MLP, and head norms where qk_layernorm is set."""

    qkv: UnfusedQKV
    qkv_bias: UnfusedQKVBias
    q_norm: HeadNorm = present_if("qk_norm")
    q_norm_bias: HeadNormBias = present_if("qk_norm")
    k_norm: HeadNorm = present_if("qk_norm")
    k_norm_bias: HeadNormBias = present_if("qk_norm")

    PARAM_MAPPING = {
        "input_layernorm.weight": "attention_norm.weight",
        "input_layernorm.bias": "attention_norm_bias.bias",
        "self_attn.q_proj.weight": "qkv.q",
        "self_attn.k_proj.weight": "qkv.k",
        "self_attn.v_proj.weight": "qkv.v",
        "self_attn.q_proj.bias": "qkv_bias.q",
        "self_attn.k_proj.bias": "qkv_bias.k",
        "self_attn.v_proj.bias": "qkv_bias.v",
        "self_attn.q_layernorm.weight": "q_norm.weight",
        "self_attn.q_layernorm.bias": "q_norm_bias.bias",
        "self_attn.k_layernorm.weight": "k_norm.weight",
        "self_attn.k_layernorm.bias": "k_norm_bias.bias",
        "self_attn.dense.weight": "out.weight",
        "self_attn.dense.bias": "out_bias.bias",
        "mlp.fc1.weight": "up.weight",
        "mlp.fc1.bias": "up_bias.bias",
        "mlp.fc2.weight": "down.weight",
        "mlp.fc2.bias": "down_bias.bias",
    }


class PhiEnds(DecoderEnds):
    """The head has a bias of its own, even where its weight is the embedding's."""

    norm_bias: NormBias
    unembed_bias: UnembeddingBias

    PARAM_MAPPING = {
        "model.final_layernorm.weight": "norm.weight",
        "model.final_layernorm.bias": "norm_bias.bias",
        "lm_head.bias": "unembed_bias.bias",
    }


# Old exports store the rotary frequencies of each layer; they follow from the config.
UNMAPPED: Final = ["model.layers.*.self_attn.rotary_emb.inv_freq"]
