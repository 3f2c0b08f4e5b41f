"""What GPT-2's config says beside the sizes: how scores are scaled."""

from dataclasses import dataclass

from jaxgen_models.learned_positions import LearnedPositionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config(LearnedPositionConfig):
    """scaled: scores are divided by the root of the head's width. scaled_by_depth: and by the
    layer's number, counted from one.
    """

    scaled: bool = True
    scaled_by_depth: bool = False

    def layer_scale(self, index: int) -> float:
        """What scores of layer `index` are multiplied by."""
        scale = self.attention_scale if self.scaled else 1.0
        return scale / (index + 1) if self.scaled_by_depth else scale
