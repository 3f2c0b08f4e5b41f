"""Gemma 2 is the soft-capped decoder; what differs is in its config."""

from jaxgen_models.soft_capped_decoder import SoftCappedDecoder


class Gemma2ForCausalLM(SoftCappedDecoder):
    """Scores and logits have soft caps."""
