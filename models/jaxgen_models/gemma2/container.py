"""Gemma 2's tensors."""

from jaxgen_models.decoder_container import DecoderEnds
from jaxgen_models.sandwich_container import SandwichLayer


class Gemma2Layer(SandwichLayer):
    """attention_bias covers q, k, v and o."""


class Gemma2Ends(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
