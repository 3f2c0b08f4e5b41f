"""Where the tensors of a layer with latent attention go, under DeepSeek's names."""

from jaxgen_checkpoints.container import LayerContainer, present_if
from jaxgen_checkpoints.parameters.attention_output import AttentionOutputBias
from jaxgen_checkpoints.parameters.latent import (
    DirectLatentIn,
    LatentInBias,
    LatentOutput,
    LatentUp,
    LowRankLatentIn,
    LowRankLatentInBias,
    QueryUp,
)
from jaxgen_checkpoints.parameters.latent_norm import LatentNorm, QueryLatentNorm
from jaxgen_checkpoints.parameters.shared_expert import SharedExpertDown, SharedExpertGateUp
from jaxgen_models.decoder_container import MLPPart, PreNorms
from jaxgen_models.moe_container import ExpertsPart


class LatentAttentionPart(LayerContainer):
    """Latent attention, with or without a latent for the queries, with biases where asked for."""

    direct_in: DirectLatentIn = present_if("direct_queries")
    direct_in_bias: LatentInBias = present_if("direct_bias")
    low_rank_in: LowRankLatentIn = present_if("low_rank_queries")
    low_rank_in_bias: LowRankLatentInBias = present_if("low_rank_bias")
    q_norm: QueryLatentNorm = present_if("low_rank_queries")
    q_up: QueryUp = present_if("low_rank_queries")
    latent_norm: LatentNorm
    latent_up: LatentUp
    out: LatentOutput
    out_bias: AttentionOutputBias = present_if("output_bias")

    PARAM_MAPPING = {
        "self_attn.q_proj.weight": "direct_in.q",
        "self_attn.kv_a_proj_with_mqa.weight": ("direct_in.kv", "low_rank_in.kv"),
        "self_attn.kv_a_proj_with_mqa.bias": ("direct_in_bias.kv", "low_rank_in_bias.kv"),
        "self_attn.q_a_proj.weight": "low_rank_in.q",
        "self_attn.q_a_proj.bias": "low_rank_in_bias.q",
        "self_attn.q_a_layernorm.weight": "q_norm.weight",
        "self_attn.q_b_proj.weight": "q_up.weight",
        "self_attn.kv_a_layernorm.weight": "latent_norm.weight",
        "self_attn.kv_b_proj.weight": "latent_up.weight",
        "self_attn.o_proj.weight": "out.weight",
        "self_attn.o_proj.bias": "out_bias.bias",
    }


class LatentDenseLayer(PreNorms, LatentAttentionPart, MLPPart):
    """A leading layer, without experts."""


class LatentSparseLayer(PreNorms, LatentAttentionPart, ExpertsPart):
    """A layer with experts, and shared ones unless the config has none."""

    shared_gate_up: SharedExpertGateUp = present_if("shared_expert")
    shared_down: SharedExpertDown = present_if("shared_expert")

    PARAM_MAPPING = {
        "mlp.shared_experts.gate_proj.weight": "shared_gate_up.gate",
        "mlp.shared_experts.up_proj.weight": "shared_gate_up.up",
        "mlp.shared_experts.down_proj.weight": "shared_down.weight",
    }
