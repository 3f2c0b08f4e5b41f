"""DeepSeek-V2 is the decoder with latent attention; what differs is in its router."""

from jaxgen_models.latent_decoder import LatentDecoder


class DeepseekV2ForCausalLM(LatentDecoder):
    """Shares are softmax scores, scaled and not normalised."""
