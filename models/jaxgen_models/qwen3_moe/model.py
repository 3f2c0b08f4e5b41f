"""Qwen3-MoE is a pre-norm decoder with experts, some layers excepted."""

from jaxgen_models.moe_decoder import MoEDecoder


class Qwen3MoeForCausalLM(MoEDecoder):
    """Query and key heads are normalised before the rotation."""
