"""Gemma 3's tensors."""

from jaxgen_checkpoints.parameters.norm import HeadNorm
from jaxgen_models.decoder_container import DecoderEnds
from jaxgen_models.sandwich_container import SandwichLayer


class Gemma3Layer(SandwichLayer):
    """Adds one norm weight for all query heads of the layer and one for its key heads."""

    q_norm: HeadNorm
    k_norm: HeadNorm

    PARAM_MAPPING = {
        "self_attn.q_norm.weight": "q_norm.weight",
        "self_attn.k_norm.weight": "k_norm.weight",
    }


class Gemma3Ends(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
