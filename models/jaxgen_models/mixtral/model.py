"""Mixtral is a pre-norm decoder with experts in every layer."""

from jaxgen_models.moe_decoder import MoEDecoder


class MixtralForCausalLM(MoEDecoder):
    """Each token goes to its best experts, whose shares add up to 1."""
