"""Where the tensors of a block with four norms go."""

from jaxgen_checkpoints.parameters.norm import Norm
from jaxgen_models.decoder_container import PreNormLayer


class SandwichLayer(PreNormLayer):
    """The name of Llama's second norm means another place here: behind the attention."""

    attended_norm: Norm
    fed_norm: Norm

    PARAM_MAPPING = {
        "post_attention_layernorm.weight": "attended_norm.weight",
        "pre_feedforward_layernorm.weight": "mlp_norm.weight",
        "post_feedforward_layernorm.weight": "fed_norm.weight",
    }
