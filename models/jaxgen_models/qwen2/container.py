"""Qwen2's tensors."""

from jaxgen_models.decoder_container import DecoderEnds, PreNormLayer


class Qwen2Layer(PreNormLayer):
    """q, k and v have biases (the config's `qkv_bias` is always on); o has none."""


class Qwen2Ends(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
