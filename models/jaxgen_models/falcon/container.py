"""Falcon's tensors, by the norms that a block has.

The three layouts of query_key_value are one: for each KV head its queries, its key and its value,
with one KV head, with some, or with one a query head.
"""

from typing import Final

from jaxgen_checkpoints.container import LayerContainer, present_if
from jaxgen_checkpoints.parameters.embedding import Embedding, Unembedding
from jaxgen_checkpoints.parameters.norm import Norm, NormBias
from jaxgen_checkpoints.parameters.qkv import GQAMegatronQKV, GQAMegatronQKVBias
from jaxgen_models.layer_norm_container import LayerNormLayer


class FalconLayer(LayerNormLayer):
    """Attention and MLP behind one norm."""

    qkv: GQAMegatronQKV
    qkv_bias: GQAMegatronQKVBias = present_if("qkv_bias")

    PARAM_MAPPING = {
        "input_layernorm.weight": "attention_norm.weight",
        "input_layernorm.bias": "attention_norm_bias.bias",
        "self_attention.query_key_value.weight": "qkv.qkv",
        "self_attention.query_key_value.bias": "qkv_bias.qkv",
        "self_attention.dense.weight": "out.weight",
        "self_attention.dense.bias": "out_bias.bias",
        "mlp.dense_h_to_4h.weight": "up.weight",
        "mlp.dense_h_to_4h.bias": "up_bias.bias",
        "mlp.dense_4h_to_h.weight": "down.weight",
        "mlp.dense_4h_to_h.bias": "down_bias.bias",
    }


class FalconSequentialLayer(FalconLayer):
    """A second norm, of what the attention has been added to."""

    mlp_norm: Norm
    mlp_norm_bias: NormBias

    PARAM_MAPPING = {
        "post_attention_layernorm.weight": "mlp_norm.weight",
        "post_attention_layernorm.bias": "mlp_norm_bias.bias",
    }


class FalconTwoNormLayer(FalconLayer):
    """Two norms of the same input."""

    mlp_norm: Norm
    mlp_norm_bias: NormBias

    PARAM_MAPPING = {
        "ln_attn.weight": "attention_norm.weight",
        "ln_attn.bias": "attention_norm_bias.bias",
        "ln_mlp.weight": "mlp_norm.weight",
        "ln_mlp.bias": "mlp_norm_bias.bias",
    }


class FalconEnds(LayerContainer):
    """Embedding, final norm, unembedding unless tied."""

    embed: Embedding
    norm: Norm
    norm_bias: NormBias
    unembed: Unembedding = present_if("untied")

    PARAM_MAPPING = {
        "transformer.word_embeddings.weight": "embed.weight",
        "transformer.ln_f.weight": "norm.weight",
        "transformer.ln_f.bias": "norm_bias.bias",
        "lm_head.weight": "unembed.weight",
    }


# Old exports store the rotary frequencies of each layer.
UNMAPPED: Final = ["transformer.h.*.self_attention.rotary_emb.inv_freq"]
