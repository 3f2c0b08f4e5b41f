"""Which prompts of different lengths have the same keys: what a prefix cache asks of a model.

Most rotations look at positions alone. `dynamic`, `longrope` and a few families of their own look
at how long the prompt is as well, so that equal tokens may have unequal keys.
"""

from collections.abc import Callable

from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder import Decoder
from jaxgen_models.policy import InferencePolicy


def length_class(policy: InferencePolicy) -> Callable[[int], int]:
    """From the length of a prompt (Sequence.anchor) to a number: the same number, the same keys.

    A model with a rotation of its own is taken to have other keys for every length.
    """
    if policy.decoder.rotation is not Decoder.rotation:
        return lambda length: length
    config, boundary = policy.config, _dynamic_from(policy.config)
    if boundary is not None:
        return lambda length: max(length, boundary)
    switch = config.recompute_at
    if switch is not None:
        return lambda length: int(length > switch)
    return lambda length: 0


def _dynamic_from(config: DecoderConfig) -> int | None:
    """The length from which on keys follow from the length itself; None where they never do."""
    ropes = [rope for rope in config.layer_ropes if rope is not None and rope.kind == "dynamic"]
    return min((int(rope.original_context) for rope in ropes), default=None)
