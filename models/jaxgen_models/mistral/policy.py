"""How a Mistral checkpoint becomes a model."""

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import read_decoder_config
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.mistral.container import MistralEnds, MistralLayer
from jaxgen_models.mistral.model import MistralForCausalLM
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.window_config import every_layer_windows


class MistralPolicy(InferencePolicy):
    """MistralForCausalLM."""

    family = "mistral"
    architectures = ("MistralForCausalLM",)
    model_types = ("mistral",)
    decoder = MistralForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """sliding_window is 4096 unless the config says otherwise."""
        return read_decoder_config(
            hf,
            cls.family,
            windows=every_layer_windows,
            kv_heads=8,
            max_positions=4096 * 32,
            activation="silu",
        )

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, MistralLayer, MistralEnds, unmapped=[])
