"""Phi-3's tensors: queries, keys and values in one, gate and up in one."""

from jaxgen_checkpoints.parameters.attention_output import AttentionOutput
from jaxgen_checkpoints.parameters.mlp import MLP2, FusedGatedMLP
from jaxgen_checkpoints.parameters.qkv import FusedQKV
from jaxgen_models.decoder_container import DecoderEnds, PreNorms


class Phi3Layer(PreNorms):
    """No biases anywhere."""

    qkv: FusedQKV
    out: AttentionOutput
    gate_up: FusedGatedMLP
    down: MLP2

    PARAM_MAPPING = {
        "self_attn.qkv_proj.weight": "qkv.qkv",
        "self_attn.o_proj.weight": "out.weight",
        "mlp.gate_up_proj.weight": "gate_up.gate_up",
        "mlp.down_proj.weight": "down.weight",
    }


class Phi3Ends(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
