"""Cohere's scale of the logits."""

from dataclasses import dataclass

from jaxgen_models.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereConfig(DecoderConfig):
    """logit_scale: of the logits."""

    logit_scale: float
