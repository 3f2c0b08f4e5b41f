"""BLOOM's tensors; the hub's files have them without the `transformer.` prefix."""

from jaxgen_checkpoints.container import LayerContainer, present_if
from jaxgen_checkpoints.parameters.embedding import Embedding, Unembedding
from jaxgen_checkpoints.parameters.norm import Norm, NormBias
from jaxgen_checkpoints.parameters.qkv import MegatronQKV, MegatronQKVBias
from jaxgen_models.layer_norm_container import LayerNormLayer


class BloomLayer(LayerNormLayer):
    """Two norms, attention with its heads' q, k and v side by side, and a plain MLP."""

    qkv: MegatronQKV
    qkv_bias: MegatronQKVBias
    mlp_norm: Norm
    mlp_norm_bias: NormBias

    PARAM_MAPPING = {
        "input_layernorm.weight": "attention_norm.weight",
        "input_layernorm.bias": "attention_norm_bias.bias",
        "self_attention.query_key_value.weight": "qkv.qkv",
        "self_attention.query_key_value.bias": "qkv_bias.qkv",
        "self_attention.dense.weight": "out.weight",
        "self_attention.dense.bias": "out_bias.bias",
        "post_attention_layernorm.weight": "mlp_norm.weight",
        "post_attention_layernorm.bias": "mlp_norm_bias.bias",
        "mlp.dense_h_to_4h.weight": "up.weight",
        "mlp.dense_h_to_4h.bias": "up_bias.bias",
        "mlp.dense_4h_to_h.weight": "down.weight",
        "mlp.dense_4h_to_h.bias": "down_bias.bias",
    }


class BloomEnds(LayerContainer):
    """Embedding and its norm, final norm, unembedding unless tied."""

    embed: Embedding
    embed_norm: Norm
    embed_norm_bias: NormBias
    norm: Norm
    norm_bias: NormBias
    unembed: Unembedding = present_if("untied")

    PARAM_MAPPING = {
        "transformer.word_embeddings.weight": "embed.weight",
        "transformer.word_embeddings_layernorm.weight": "embed_norm.weight",
        "transformer.word_embeddings_layernorm.bias": "embed_norm_bias.bias",
        "transformer.ln_f.weight": "norm.weight",
        "transformer.ln_f.bias": "norm_bias.bias",
        "lm_head.weight": "unembed.weight",
    }
