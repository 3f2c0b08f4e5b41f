"""How a Qwen3-MoE checkpoint becomes a model."""

from typing import Final

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import Defaults, read_decoder_fields
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.moe_config import MoEConfig, read_qwen_experts
from jaxgen_models.moe_container import layer_kinds
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.qwen3_moe.container import Qwen3MoeDenseLayer, Qwen3MoeEnds, Qwen3MoeLayer
from jaxgen_models.qwen3_moe.model import Qwen3MoeForCausalLM
from jaxgen_models.window_config import Windows

_DEFAULTS: Final = Defaults(kv_heads=4, max_positions=32768, activation="silu")


class Qwen3MoePolicy(InferencePolicy):
    """Qwen3MoeForCausalLM."""

    family = "qwen3_moe"
    architectures = ("Qwen3MoeForCausalLM",)
    model_types = ("qwen3_moe",)
    decoder = Qwen3MoeForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """intermediate_size is the width of layers without experts; attention_bias covers o too."""
        fields = read_decoder_fields(hf, defaults=_DEFAULTS, windows=switched_windows)
        attention_bias = hf.flag("attention_bias", False)
        if not hf.flag("use_qk_norm", True):
            raise hf.error("use_qk_norm = false is not supported")
        config = MoEConfig(
            **fields,
            qk_norm=True,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            **read_qwen_experts(hf, int(fields["num_layers"]), experts=128, top_k=8, width=768),
        )
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        assert isinstance(self.config, MoEConfig)
        layers = layer_kinds(self.config, Qwen3MoeDenseLayer, Qwen3MoeLayer)
        return llama_like_map(self.config, layers, Qwen3MoeEnds, unmapped=[])


def switched_windows(hf: HFConfig, num_layers: int) -> Windows:
    """With use_sliding_window all layers attend through the window, whatever max_window_layers
    says.
    """
    hf.ignore("max_window_layers", "sliding_window")
    if not hf.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = hf.optional_size("sliding_window", absent=4096)
    return (None if window is None else int(window),) * num_layers
