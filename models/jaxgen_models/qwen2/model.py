"""Qwen2 is the pre-norm decoder; what differs is in its config and its tensors."""

from jaxgen_models.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """A Llama-like decoder with QKV biases; the upper layers may look back through a window."""
