"""DeepSeek-V3's tensors; those of the layers that predict further tokens are left out."""

from jaxgen_checkpoints.parameters.router_bias import ChoiceBias
from jaxgen_models.decoder_container import DecoderEnds
from jaxgen_models.latent_container import LatentDenseLayer, LatentSparseLayer


class DeepseekV3DenseLayer(LatentDenseLayer):
    """A leading layer, without experts."""


class DeepseekV3Layer(LatentSparseLayer):
    """Adds the bias that balances the choice of experts."""

    choice_bias: ChoiceBias

    PARAM_MAPPING = {"mlp.gate.e_score_correction_bias": "choice_bias.bias"}


class DeepseekV3Ends(DecoderEnds):
    """Embedding, final norm, unembedding unless tied."""
