"""OLMo 2's tensors."""

from jaxgen_checkpoints.parameters.head_norms import KeyProjectionNorm, QueryProjectionNorm
from jaxgen_models.decoder_container import DecoderEnds
from jaxgen_models.post_norm_container import PostNormLayer


class Olmo2Layer(PostNormLayer):
    """Adds a norm weight for every channel of all queries, and of all keys."""

    q_norm: QueryProjectionNorm
    k_norm: KeyProjectionNorm

    PARAM_MAPPING = {
        "self_attn.q_norm.weight": "q_norm.weight",
        "self_attn.k_norm.weight": "k_norm.weight",
    }


class Olmo2Ends(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
