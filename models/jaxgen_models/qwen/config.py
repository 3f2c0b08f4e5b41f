"""What Qwen's config says beside the sizes: what happens beyond the trained length."""

from dataclasses import dataclass

from jaxgen_models.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenConfig(DecoderConfig):
    """trained_context: tokens of the longest sequence in training. dynamic_ntk: prompts beyond it
    stretch the rotary base. logn: queries beyond it grow with the logarithm of their position.
    """

    trained_context: int
    dynamic_ntk: bool = True
    logn: bool = True

    @property
    def unbounded(self) -> bool:
        """With a base that stretches there is no last position."""
        return self.dynamic_ntk
