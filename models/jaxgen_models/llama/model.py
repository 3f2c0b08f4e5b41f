"""Llama is the plain pre-norm decoder."""

from jaxgen_models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """Pre-norm blocks with grouped-query attention, rotary positions and a gated MLP."""
