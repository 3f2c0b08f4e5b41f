"""What BLOOM's config says beside the sizes: what a block's parts are added to."""

from dataclasses import dataclass

from jaxgen_models.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomConfig(DecoderConfig):
    """residual_after_norm: each part is added to its own normalised input."""

    residual_after_norm: bool = False
