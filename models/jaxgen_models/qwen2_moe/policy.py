"""How a Qwen2-MoE checkpoint becomes a model."""

from typing import Final

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import Defaults, read_decoder_fields
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.moe_config import MoEConfig, read_qwen_experts
from jaxgen_models.moe_container import layer_kinds
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.qwen2_moe.container import Qwen2MoeDenseLayer, Qwen2MoeEnds, Qwen2MoeLayer
from jaxgen_models.qwen2_moe.model import Qwen2MoeForCausalLM
from jaxgen_models.window_config import Windows, layer_type_windows

_DEFAULTS: Final = Defaults(kv_heads=16, max_positions=32768, activation="silu")


class Qwen2MoePolicy(InferencePolicy):
    """Qwen2MoeForCausalLM."""

    family = "qwen2_moe"
    architectures = ("Qwen2MoeForCausalLM",)
    model_types = ("qwen2_moe",)
    decoder = Qwen2MoeForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """intermediate_size is the width of layers without experts."""
        fields = read_decoder_fields(hf, defaults=_DEFAULTS, windows=even_layer_windows)
        config = MoEConfig(
            **fields,
            qkv_bias=hf.flag("qkv_bias", True),
            **read_qwen_experts(hf, int(fields["num_layers"]), experts=60, top_k=4, width=1408),
            shared_ffn_dim=hf.size("shared_expert_intermediate_size", 5632),
        )
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        assert isinstance(self.config, MoEConfig)
        layers = layer_kinds(self.config, Qwen2MoeDenseLayer, Qwen2MoeLayer)
        return llama_like_map(self.config, layers, Qwen2MoeEnds, unmapped=[])


def even_layer_windows(hf: HFConfig, num_layers: int) -> Windows:
    """With use_sliding_window, even layers below max_window_layers attend through the window."""
    hf.ignore("sliding_window")
    first_full = int(hf.size("max_window_layers", 28)) if hf.raw.get("max_window_layers", 28) else 0
    hf.ignore("max_window_layers")
    width = None
    if hf.flag("use_sliding_window", False):
        window = hf.optional_size("sliding_window", absent=4096)
        width = None if window is None else int(window)
    explicit = layer_type_windows(hf, num_layers, width)
    if explicit is not None:
        return explicit
    return tuple(width if i % 2 == 0 and i < first_full else None for i in range(num_layers))
