"""How a Qwen3 checkpoint becomes a model."""

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import read_decoder_config
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.qwen3.container import Qwen3Ends, Qwen3Layer
from jaxgen_models.qwen3.model import Qwen3ForCausalLM
from jaxgen_models.window_config import upper_layer_windows


class Qwen3Policy(InferencePolicy):
    """Qwen3ForCausalLM."""

    family = "qwen3"
    architectures = ("Qwen3ForCausalLM",)
    model_types = ("qwen3",)
    decoder = Qwen3ForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """head_dim is 128 where the config does not say; attention_bias covers q, k, v and o."""
        attention_bias = hf.flag("attention_bias", False)
        return read_decoder_config(
            hf,
            cls.family,
            windows=upper_layer_windows,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            qk_norm=True,
            head_dim=128,
            kv_heads=32,
            max_positions=32768,
            activation="silu",
        )

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, Qwen3Layer, Qwen3Ends, unmapped=[])
