"""Mistral's tensors."""

from jaxgen_models.decoder_container import DecoderEnds, PreNormLayer


class MistralLayer(PreNormLayer):
    """No biases anywhere."""


class MistralEnds(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
