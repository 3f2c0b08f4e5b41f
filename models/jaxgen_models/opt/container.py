"""OPT's tensors; some of the hub's files have them without the `model.` prefix."""

from jaxgen_checkpoints.container import LayerContainer, present_if
from jaxgen_checkpoints.parameters.attention_output import AttentionOutput, AttentionOutputBias
from jaxgen_checkpoints.parameters.mlp import MLP1, MLP2, MLP1Bias, MLP2Bias
from jaxgen_checkpoints.parameters.norm import Norm, NormBias
from jaxgen_checkpoints.parameters.position_embedding import PositionEmbedding
from jaxgen_checkpoints.parameters.projected_embedding import (
    ProjectedEmbedding,
    ProjectedUnembedding,
    ProjectIn,
    ProjectOut,
)
from jaxgen_checkpoints.parameters.qkv import UnfusedQKV, UnfusedQKVBias


class OPTLayer(LayerContainer):
    """The norm called final_layer_norm is the MLP's, in every layer."""

    attention_norm: Norm = present_if("affine_norms")
    attention_norm_bias: NormBias = present_if("affine_norms")
    qkv: UnfusedQKV
    qkv_bias: UnfusedQKVBias = present_if("qkv_bias")
    out: AttentionOutput
    out_bias: AttentionOutputBias = present_if("output_bias")
    mlp_norm: Norm = present_if("affine_norms")
    mlp_norm_bias: NormBias = present_if("affine_norms")
    up: MLP1
    up_bias: MLP1Bias = present_if("mlp_bias")
    down: MLP2
    down_bias: MLP2Bias = present_if("mlp_bias")

    PARAM_MAPPING = {
        "self_attn_layer_norm.weight": "attention_norm.weight",
        "self_attn_layer_norm.bias": "attention_norm_bias.bias",
        "self_attn.q_proj.weight": "qkv.q",
        "self_attn.k_proj.weight": "qkv.k",
        "self_attn.v_proj.weight": "qkv.v",
        "self_attn.q_proj.bias": "qkv_bias.q",
        "self_attn.k_proj.bias": "qkv_bias.k",
        "self_attn.v_proj.bias": "qkv_bias.v",
        "self_attn.out_proj.weight": "out.weight",
        "self_attn.out_proj.bias": "out_bias.bias",
        "final_layer_norm.weight": "mlp_norm.weight",
        "final_layer_norm.bias": "mlp_norm_bias.bias",
        "fc1.weight": "up.weight",
        "fc1.bias": "up_bias.bias",
        "fc2.weight": "down.weight",
        "fc2.bias": "down_bias.bias",
    }


class OPTEnds(LayerContainer):
    """Tokens and positions, projections where the embeddings are narrower, and the last norm."""

    embed: ProjectedEmbedding
    positions: PositionEmbedding
    project_in: ProjectIn = present_if("projected")
    project_out: ProjectOut = present_if("projected")
    norm: Norm = present_if("affine_last_norm")
    norm_bias: NormBias = present_if("affine_last_norm")
    unembed: ProjectedUnembedding = present_if("untied")

    PARAM_MAPPING = {
        "model.decoder.embed_tokens.weight": "embed.weight",
        "model.decoder.embed_positions.weight": "positions.weight",
        "model.decoder.project_in.weight": "project_in.weight",
        "model.decoder.project_out.weight": "project_out.weight",
        "model.decoder.final_layer_norm.weight": "norm.weight",
        "model.decoder.final_layer_norm.bias": "norm_bias.bias",
        "lm_head.weight": "unembed.weight",
    }
