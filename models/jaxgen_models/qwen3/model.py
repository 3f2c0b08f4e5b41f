"""Qwen3 is the pre-norm decoder; what differs is in its config and its tensors."""

from jaxgen_models.decoder import Decoder


class Qwen3ForCausalLM(Decoder):
    """A Llama-like decoder that normalises query and key heads before the rotation."""
