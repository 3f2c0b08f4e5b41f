"""EXAONE 4: post-norm blocks; which layers rotate is in its config."""

from jaxgen_models.decoder import Decoder
from jaxgen_models.layers.post_norm_block import PostNormBlock


class Exaone4ForCausalLM(Decoder):
    """A decoder of post-norm blocks with query and key norms for each head."""

    block = PostNormBlock
