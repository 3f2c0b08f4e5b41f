"""GPT-2's tensors; the hub's file has them without the `transformer.` prefix."""

from typing import Final

from jaxgen_checkpoints.container import LayerContainer, present_if
from jaxgen_checkpoints.parameters.attention_output import AttentionOutputBias
from jaxgen_checkpoints.parameters.embedding import Embedding, Unembedding
from jaxgen_checkpoints.parameters.in_out import (
    InOutAttentionOutput,
    InOutMLP1,
    InOutMLP2,
    InOutQKV,
)
from jaxgen_checkpoints.parameters.mlp import MLP1Bias, MLP2Bias
from jaxgen_checkpoints.parameters.norm import Norm, NormBias
from jaxgen_checkpoints.parameters.position_embedding import PositionEmbedding
from jaxgen_checkpoints.parameters.qkv import FusedQKVBias


class GPT2Layer(LayerContainer):
    """Two norms, fused attention and a plain MLP, biases everywhere."""

    attention_norm: Norm
    attention_norm_bias: NormBias
    qkv: InOutQKV
    qkv_bias: FusedQKVBias
    out: InOutAttentionOutput
    out_bias: AttentionOutputBias
    mlp_norm: Norm
    mlp_norm_bias: NormBias
    up: InOutMLP1
    up_bias: MLP1Bias
    down: InOutMLP2
    down_bias: MLP2Bias

    PARAM_MAPPING = {
        "ln_1.weight": "attention_norm.weight",
        "ln_1.bias": "attention_norm_bias.bias",
        "attn.c_attn.weight": "qkv.qkv",
        "attn.c_attn.bias": "qkv_bias.qkv",
        "attn.c_proj.weight": "out.weight",
        "attn.c_proj.bias": "out_bias.bias",
        "ln_2.weight": "mlp_norm.weight",
        "ln_2.bias": "mlp_norm_bias.bias",
        "mlp.c_fc.weight": "up.weight",
        "mlp.c_fc.bias": "up_bias.bias",
        "mlp.c_proj.weight": "down.weight",
        "mlp.c_proj.bias": "down_bias.bias",
    }


class GPT2Ends(LayerContainer):
    """Tokens, positions, final norm, unembedding unless tied."""

    embed: Embedding
    positions: PositionEmbedding
    norm: Norm
    norm_bias: NormBias
    unembed: Unembedding = present_if("untied")

    PARAM_MAPPING = {
        "transformer.wte.weight": "embed.weight",
        "transformer.wpe.weight": "positions.weight",
        "transformer.ln_f.weight": "norm.weight",
        "transformer.ln_f.bias": "norm_bias.bias",
        "lm_head.weight": "unembed.weight",
    }


# Old exports store the causal mask of each layer.
UNMAPPED: Final = ["transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"]
