"""Where the tensors of a block with norms behind attention and MLP go."""

from jaxgen_models.decoder_container import PreNormLayer


class PostNormLayer(PreNormLayer):
    """The tensors of a Llama-like block, whose two norms have other names and other places."""

    PARAM_MAPPING = {
        "post_attention_layernorm.weight": "attention_norm.weight",
        "post_feedforward_layernorm.weight": "mlp_norm.weight",
    }
