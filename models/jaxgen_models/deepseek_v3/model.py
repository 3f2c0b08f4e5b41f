"""DeepSeek-V3 is the decoder with latent attention; what differs is in its router."""

from jaxgen_models.latent_decoder import LatentDecoder


class DeepseekV3ForCausalLM(LatentDecoder):
    """Experts are chosen by biased sigmoid scores and weighed by the scores themselves."""
