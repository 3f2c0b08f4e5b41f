"""GPT-NeoX's tensors."""

from typing import Final

from jaxgen_checkpoints.container import LayerContainer, present_if
from jaxgen_checkpoints.parameters.embedding import Embedding, Unembedding
from jaxgen_checkpoints.parameters.norm import Norm, NormBias
from jaxgen_checkpoints.parameters.qkv import MegatronQKV, MegatronQKVBias
from jaxgen_models.layer_norm_container import LayerNormLayer


class GPTNeoXLayer(LayerNormLayer):
    """Two norms, attention with its heads' q, k and v side by side, and a plain MLP."""

    qkv: MegatronQKV
    qkv_bias: MegatronQKVBias = present_if("qkv_bias")
    mlp_norm: Norm
    mlp_norm_bias: NormBias

    PARAM_MAPPING = {
        "input_layernorm.weight": "attention_norm.weight",
        "input_layernorm.bias": "attention_norm_bias.bias",
        "attention.query_key_value.weight": "qkv.qkv",
        "attention.query_key_value.bias": "qkv_bias.qkv",
        "attention.dense.weight": "out.weight",
        "attention.dense.bias": "out_bias.bias",
        "post_attention_layernorm.weight": "mlp_norm.weight",
        "post_attention_layernorm.bias": "mlp_norm_bias.bias",
        "mlp.dense_h_to_4h.weight": "up.weight",
        "mlp.dense_h_to_4h.bias": "up_bias.bias",
        "mlp.dense_4h_to_h.weight": "down.weight",
        "mlp.dense_4h_to_h.bias": "down_bias.bias",
    }


class GPTNeoXEnds(LayerContainer):
    """Embedding, final norm, unembedding unless tied."""

    embed: Embedding
    norm: Norm
    norm_bias: NormBias
    unembed: Unembedding = present_if("untied")

    PARAM_MAPPING = {
        "gpt_neox.embed_in.weight": "embed.weight",
        "gpt_neox.final_layer_norm.weight": "norm.weight",
        "gpt_neox.final_layer_norm.bias": "norm_bias.bias",
        "embed_out.weight": "unembed.weight",
    }


# Causal masks and rotary frequencies, which old exports store for each layer.
UNMAPPED: Final = [
    "gpt_neox.layers.*.attention.bias",
    "gpt_neox.layers.*.attention.masked_bias",
    "gpt_neox.layers.*.attention.rotary_emb.**",
]
