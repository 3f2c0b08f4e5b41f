"""How a Qwen2 checkpoint becomes a model."""

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import read_decoder_config
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.qwen2.container import Qwen2Ends, Qwen2Layer
from jaxgen_models.qwen2.model import Qwen2ForCausalLM
from jaxgen_models.window_config import upper_layer_windows


class Qwen2Policy(InferencePolicy):
    """Qwen2ForCausalLM."""

    family = "qwen2"
    architectures = ("Qwen2ForCausalLM",)
    model_types = ("qwen2",)
    decoder = Qwen2ForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """use_sliding_window, max_window_layers and layer_types decide on the windows."""
        return read_decoder_config(
            hf,
            cls.family,
            windows=upper_layer_windows,
            qkv_bias=True,
            kv_heads=32,
            max_positions=32768,
            activation="silu",
        )

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, Qwen2Layer, Qwen2Ends, unmapped=[])
