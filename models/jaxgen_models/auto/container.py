"""Everything a Llama-like block may hold; the policy switches on what the tensors show."""

from jaxgen_checkpoints.container import present_if
from jaxgen_checkpoints.parameters.norm import HeadNorm
from jaxgen_models.decoder_container import PreNormLayer


class AutoLayer(PreNormLayer):
    """Adds the optional head norms."""

    q_norm: HeadNorm = present_if("qk_norm")
    k_norm: HeadNorm = present_if("qk_norm")

    PARAM_MAPPING = {
        "self_attn.q_norm.weight": "q_norm.weight",
        "self_attn.k_norm.weight": "k_norm.weight",
    }
