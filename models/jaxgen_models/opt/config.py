"""What OPT's config says beside the sizes: where the norms are and what they hold."""

from dataclasses import dataclass

from jaxgen_checkpoints.dim import Dim
from jaxgen_models.learned_positions import LearnedPositionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTConfig(LearnedPositionConfig):
    """embed_dim: width of the embeddings. norm_before: each part reads normalised input; otherwise
    what comes out of it is normalised. last_norm: one more behind the last block. affine_norms:
    norms have weights and biases.
    """

    embed_dim: Dim
    norm_before: bool = True
    last_norm: bool = True
    affine_norms: bool = True

    @property
    def projected(self) -> bool:
        """Whether the embeddings have another width than the residual stream."""
        return self.embed_dim != self.model_dim

    @property
    def affine_last_norm(self) -> bool:
        """Whether there is a last norm with tensors of its own."""
        return self.last_norm and self.affine_norms
