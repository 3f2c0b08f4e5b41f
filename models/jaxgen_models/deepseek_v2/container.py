"""DeepSeek-V2's tensors."""

from jaxgen_models.decoder_container import DecoderEnds
from jaxgen_models.latent_container import LatentDenseLayer, LatentSparseLayer


class DeepseekV2DenseLayer(LatentDenseLayer):
    """A leading layer, without experts."""


class DeepseekV2Layer(LatentSparseLayer):
    """A layer with routed and shared experts."""


class DeepseekV2Ends(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
