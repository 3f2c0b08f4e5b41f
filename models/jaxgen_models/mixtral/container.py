"""Mixtral's tensors: of an expert's three weights w1 is the gate, w3 up and w2 down."""

from jaxgen_models.decoder_container import AttentionPart, DecoderEnds, PreNorms
from jaxgen_models.moe_container import ExpertsPart


class MixtralLayer(PreNorms, AttentionPart, ExpertsPart):
    """No biases anywhere."""

    PARAM_MAPPING = {
        "block_sparse_moe.gate.weight": "router.weight",
        "block_sparse_moe.experts.*.w1.weight": "experts_gate_up.gate",
        "block_sparse_moe.experts.*.w3.weight": "experts_gate_up.up",
        "block_sparse_moe.experts.*.w2.weight": "experts_down.down",
    }


class MixtralEnds(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
