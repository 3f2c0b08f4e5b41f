"""Qwen2-MoE's tensors."""

from jaxgen_checkpoints.parameters.shared_expert import SharedExpertGate
from jaxgen_models.decoder_container import AttentionPart, DecoderEnds, PreNormLayer, PreNorms
from jaxgen_models.moe_container import ExpertsPart, SharedExpertPart


class Qwen2MoeDenseLayer(PreNormLayer):
    """A layer without experts: q, k and v have biases unless the config says otherwise."""


class Qwen2MoeLayer(PreNorms, AttentionPart, ExpertsPart, SharedExpertPart):
    """A layer with experts and one for all tokens, behind a gate."""

    shared_gate: SharedExpertGate

    PARAM_MAPPING = {
        "mlp.shared_expert.gate_proj.weight": "shared_gate_up.gate",
        "mlp.shared_expert.up_proj.weight": "shared_gate_up.up",
        "mlp.shared_expert.down_proj.weight": "shared_down.weight",
        "mlp.shared_expert_gate.weight": "shared_gate.weight",
    }


class Qwen2MoeEnds(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
