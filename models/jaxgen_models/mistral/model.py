"""Mistral is the pre-norm decoder; what differs is in its config and its tensors."""

from jaxgen_models.decoder import Decoder


class MistralForCausalLM(Decoder):
    """A Llama-like decoder whose layers look back through a window."""
