"""Qwen2-MoE is a pre-norm decoder with experts, some layers excepted."""

from jaxgen_models.moe_decoder import MoEDecoder


class Qwen2MoeForCausalLM(MoEDecoder):
    """Shares of the chosen experts do not add up to 1 unless the config says so."""
