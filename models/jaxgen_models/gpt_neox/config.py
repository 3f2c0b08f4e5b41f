"""What GPT-NeoX's config says beside the sizes: how a block is wired."""

from dataclasses import dataclass

from jaxgen_models.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    """parallel: attention and MLP read the same residual stream, each by a norm of its own."""

    parallel: bool = True
