"""Cohere's tensors."""

from jaxgen_checkpoints.container import present_if
from jaxgen_checkpoints.parameters.head_norms import KeyHeadNorms, QueryHeadNorms
from jaxgen_checkpoints.parameters.norm import Norm
from jaxgen_models.decoder_container import AttentionPart, DecoderEnds, MLPPart


class CohereLayer(AttentionPart, MLPPart):
    """One norm for attention and MLP; where use_qk_norm is set, each head has norms of its own."""

    attention_norm: Norm
    q_norm: QueryHeadNorms = present_if("qk_norm")
    k_norm: KeyHeadNorms = present_if("qk_norm")

    PARAM_MAPPING = {
        "input_layernorm.weight": "attention_norm.weight",
        "self_attn.q_norm.weight": "q_norm.weight",
        "self_attn.k_norm.weight": "k_norm.weight",
    }


class CohereEnds(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
