"""Phi-3 is the pre-norm decoder; what differs is in its config and its tensors."""

from jaxgen_models.decoder import Decoder


class Phi3ForCausalLM(Decoder):
    """A Llama-like decoder that may rotate a part of each head, and long sequences otherwise."""
