"""How a Gemma 2 checkpoint becomes a model."""

from types import MappingProxyType
from typing import ClassVar

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.decoder_config import Defaults, read_decoder_fields
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.gemma2.container import Gemma2Ends, Gemma2Layer
from jaxgen_models.gemma2.model import Gemma2ForCausalLM
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.soft_capped_config import SoftCappedConfig, soft_cap_fields
from jaxgen_models.window_config import Windows, hybrid_windows


class Gemma2Policy(InferencePolicy):
    """Gemma2ForCausalLM."""

    family = "gemma2"
    architectures = ("Gemma2ForCausalLM",)
    model_types = ("gemma2",)
    refuses: ClassVar = MappingProxyType({"use_bidirectional_attention": True})
    decoder = Gemma2ForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> SoftCappedConfig:
        """Absent keys mean the 2B model's; absent soft caps are 50 and 30, null is none."""
        defaults = Defaults(
            tied=True,
            head_dim=256,
            kv_heads=4,
            max_positions=8192,
            activation="gelu_pytorch_tanh",
            activation_key="hidden_activation",
        )
        fields = read_decoder_fields(hf, defaults=defaults, windows=_windows)
        config = SoftCappedConfig(**fields, **soft_cap_fields(hf, attention=50.0, logits=30.0))
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, Gemma2Layer, Gemma2Ends, unmapped=[])


def _windows(hf: HFConfig, num_layers: int) -> Windows:
    """Layers 0, 2, 4 ... slide unless layer_types says otherwise."""
    return hybrid_windows(hf, num_layers, absent=4096, period=2)
