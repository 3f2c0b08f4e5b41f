"""Granite's multipliers."""

from dataclasses import dataclass

from jaxgen_models.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """embedding_multiplier: of the embedding. residual_multiplier: of what attention and MLP add.
    attention_multiplier: of the scores, in place of head_dim ** -0.5. logits_scaling: divides the
    logits.
    """

    embedding_multiplier: float
    residual_multiplier: float
    attention_multiplier: float
    logits_scaling: float

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return self.attention_multiplier
