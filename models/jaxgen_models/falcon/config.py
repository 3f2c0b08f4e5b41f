"""What Falcon's config says beside the sizes: how a block is wired and how many norms it has."""

from dataclasses import dataclass

from jaxgen_models.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconConfig(DecoderConfig):
    """parallel: attention and MLP read the same residual stream. two_norms: in a parallel block,
    each of them by a norm of its own.
    """

    parallel: bool = True
    two_norms: bool = False
