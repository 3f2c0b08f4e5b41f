"""Where the tensors of a Llama-like checkpoint go; families extend these declarations."""

from collections.abc import Sequence

from jaxgen_checkpoints.container import LayerContainer, present_if
from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.parameters.attention_output import AttentionOutput, AttentionOutputBias
from jaxgen_checkpoints.parameters.embedding import Embedding, Unembedding
from jaxgen_checkpoints.parameters.mlp import MLP2, GatedMLP, GatedMLPBias, MLP2Bias
from jaxgen_checkpoints.parameters.norm import Norm
from jaxgen_checkpoints.parameters.qkv import UnfusedQKV, UnfusedQKVBias
from jaxgen_models.config import DecoderConfig


class PreNorms(LayerContainer):
    """The norms before the two parts of a block."""

    attention_norm: Norm
    mlp_norm: Norm

    PARAM_MAPPING = {
        "input_layernorm.weight": "attention_norm.weight",
        "post_attention_layernorm.weight": "mlp_norm.weight",
    }


class AttentionPart(LayerContainer):
    """Grouped-query attention, with biases where the config asks for them."""

    qkv: UnfusedQKV
    qkv_bias: UnfusedQKVBias = present_if("qkv_bias")
    out: AttentionOutput
    out_bias: AttentionOutputBias = present_if("output_bias")

    PARAM_MAPPING = {
        "self_attn.q_proj.weight": "qkv.q",
        "self_attn.k_proj.weight": "qkv.k",
        "self_attn.v_proj.weight": "qkv.v",
        "self_attn.q_proj.bias": "qkv_bias.q",
        "self_attn.k_proj.bias": "qkv_bias.k",
        "self_attn.v_proj.bias": "qkv_bias.v",
        "self_attn.o_proj.weight": "out.weight",
        "self_attn.o_proj.bias": "out_bias.bias",
    }


class MLPPart(LayerContainer):
    """A gated MLP, with biases where the config asks for them."""

    gate_up: GatedMLP
    gate_up_bias: GatedMLPBias = present_if("mlp_bias")
    down: MLP2
    down_bias: MLP2Bias = present_if("mlp_bias")

    PARAM_MAPPING = {
        "mlp.gate_proj.weight": "gate_up.gate",
        "mlp.up_proj.weight": "gate_up.up",
        "mlp.gate_proj.bias": "gate_up_bias.gate",
        "mlp.up_proj.bias": "gate_up_bias.up",
        "mlp.down_proj.weight": "down.weight",
        "mlp.down_proj.bias": "down_bias.bias",
    }


class PreNormLayer(PreNorms, AttentionPart, MLPPart):
    """One block of a Llama-like decoder."""


class DecoderEnds(LayerContainer):
    """What is not in a block: embedding, final norm, and an unembedding unless it is tied."""

    embed: Embedding
    norm: Norm
    unembed: Unembedding = present_if("untied")

    PARAM_MAPPING = {
        "model.embed_tokens.weight": "embed.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "unembed.weight",
    }


def llama_like_map(
    config: DecoderConfig,
    layer: type[LayerContainer] | Sequence[type[LayerContainer]],
    ends: type[LayerContainer],
    unmapped: list[str],
) -> ContainerMap:
    """model.layers.N in one container each, everything else in `ends`; a tied head may be stored
    twice, and all names may lack `model.`.

    layer: the kind of all layers, or of each.
    """
    embedding = "model.embed_tokens.weight"
    return decoder_map(config, "model.layers", layer, ends, unmapped, embedding, prefix="model.")


def decoder_map(
    config: DecoderConfig,
    layers: str,
    layer: type[LayerContainer] | Sequence[type[LayerContainer]],
    ends: type[LayerContainer],
    unmapped: list[str],
    embedding: str,
    *,
    prefix: str | None = None,
) -> ContainerMap:
    """As llama_like_map, where layers and the embedding have these names; prefix: what checkpoints
    may leave out at the beginning of every name.
    """
    kinds = [layer] * config.num_layers if isinstance(layer, type) else layer
    containers = ContainerMap()
    if prefix is not None:
        containers.set_other_beginnings({"": prefix})
    containers.set_transformer_params([layers], [kind(config) for kind in kinds])
    containers.set_non_transformer_params(ends(config))
    containers.set_unmapped_params(unmapped)
    if config.tied:
        containers.set_tied({"lm_head.weight": embedding})
    return containers
