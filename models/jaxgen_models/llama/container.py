"""Llama's tensors: the plain Llama-like layout, old checkpoints with rotary buffers included."""

from typing import Final

from jaxgen_models.decoder_container import DecoderEnds, PreNormLayer


class LlamaLayer(PreNormLayer):
    """attention_bias covers q, k, v and o; mlp_bias covers gate, up and down."""


class LlamaEnds(DecoderEnds):
    """Embedding, final norm, unembedding."""


# Old exports store the rotary frequencies of each layer; they follow from the config.
UNMAPPED: Final = ["model.layers.*.self_attn.rotary_emb.inv_freq"]
