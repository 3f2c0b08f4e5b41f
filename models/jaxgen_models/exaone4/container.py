"""EXAONE 4's tensors, and those of 4.5 that are not of its text part."""

from typing import Final

from jaxgen_checkpoints.parameters.norm import HeadNorm
from jaxgen_models.decoder_container import DecoderEnds
from jaxgen_models.post_norm_container import PostNormLayer


class Exaone4Layer(PostNormLayer):
    """Adds one norm weight for all query heads of the layer and one for its key heads."""

    q_norm: HeadNorm
    k_norm: HeadNorm

    PARAM_MAPPING = {
        "self_attn.q_norm.weight": "q_norm.weight",
        "self_attn.k_norm.weight": "k_norm.weight",
    }


class Exaone4Ends(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""


# The image encoder, and the layers that predict a second token.
UNMAPPED_45: Final = ["model.visual.**", "mtp.**"]
