"""GPT-OSS's tensors; MXFP4 files are widened to the same names and shapes when they are opened."""

from jaxgen_checkpoints.container import LayerContainer
from jaxgen_checkpoints.parameters.interleaved_experts import (
    ExpertsDownBias,
    InterleavedGatedExperts,
    InterleavedGatedExpertsBias,
    TransposedExpertsDown,
)
from jaxgen_checkpoints.parameters.moe import Router
from jaxgen_checkpoints.parameters.router_bias import RouterBias
from jaxgen_checkpoints.parameters.sinks import Sinks
from jaxgen_models.decoder_container import AttentionPart, DecoderEnds, PreNorms


class GptOssExpertsPart(LayerContainer):
    """All experts of a layer are one tensor each of gate and up, and of down."""

    router: Router
    router_bias: RouterBias
    experts_gate_up: InterleavedGatedExperts
    experts_gate_up_bias: InterleavedGatedExpertsBias
    experts_down: TransposedExpertsDown
    experts_down_bias: ExpertsDownBias

    PARAM_MAPPING = {
        "mlp.router.weight": "router.weight",
        "mlp.router.bias": "router_bias.bias",
        "mlp.experts.gate_up_proj": "experts_gate_up.gate_up",
        "mlp.experts.gate_up_proj_bias": "experts_gate_up_bias.gate_up",
        "mlp.experts.down_proj": "experts_down.down",
        "mlp.experts.down_proj_bias": "experts_down_bias.down",
    }


class GptOssLayer(PreNorms, AttentionPart, GptOssExpertsPart):
    """attention_bias, true unless the config says otherwise, covers q, k, v and o."""

    sinks: Sinks

    PARAM_MAPPING = {"self_attn.sinks": "sinks.sinks"}


class GptOssEnds(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
