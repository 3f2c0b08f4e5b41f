"""The parameters that blocks with LayerNorms and an MLP without a gate have in common."""

from jaxgen_checkpoints.container import LayerContainer, present_if
from jaxgen_checkpoints.parameters.attention_output import AttentionOutput, AttentionOutputBias
from jaxgen_checkpoints.parameters.mlp import MLP1, MLP2, MLP1Bias, MLP2Bias
from jaxgen_checkpoints.parameters.norm import Norm, NormBias


class LayerNormLayer(LayerContainer):
    """One norm, the attention's output and the MLP; a family adds QKV, further norms and names."""

    attention_norm: Norm
    attention_norm_bias: NormBias
    out: AttentionOutput
    out_bias: AttentionOutputBias = present_if("output_bias")
    up: MLP1
    up_bias: MLP1Bias = present_if("mlp_bias")
    down: MLP2
    down_bias: MLP2Bias = present_if("mlp_bias")
