"""Gemma 3 is the soft-capped decoder with head norms; what differs is in its config."""

from jaxgen_models.soft_capped_decoder import SoftCappedDecoder


class Gemma3ForCausalLM(SoftCappedDecoder):
    """Text only; soft caps are off unless the config sets them."""
