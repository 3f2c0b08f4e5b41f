"""Granite's tensors: the Llama-like layout."""

from jaxgen_models.decoder_container import DecoderEnds, PreNormLayer


class GraniteLayer(PreNormLayer):
    """attention_bias covers q, k, v and o; mlp_bias covers gate, up and down."""


class GraniteEnds(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
