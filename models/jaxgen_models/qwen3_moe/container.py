"""Qwen3-MoE's tensors."""

from jaxgen_checkpoints.container import LayerContainer
from jaxgen_checkpoints.parameters.norm import HeadNorm
from jaxgen_models.decoder_container import AttentionPart, DecoderEnds, PreNormLayer, PreNorms
from jaxgen_models.moe_container import ExpertsPart


class HeadNorms(LayerContainer):
    """One norm weight for all query heads of a layer and one for its key heads."""

    q_norm: HeadNorm
    k_norm: HeadNorm

    PARAM_MAPPING = {
        "self_attn.q_norm.weight": "q_norm.weight",
        "self_attn.k_norm.weight": "k_norm.weight",
    }


class Qwen3MoeDenseLayer(PreNormLayer, HeadNorms):
    """A layer without experts."""


class Qwen3MoeLayer(PreNorms, AttentionPart, HeadNorms, ExpertsPart):
    """A layer with experts."""


class Qwen3MoeEnds(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
