"""How a Llama checkpoint becomes a model."""

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import read_decoder_config
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.llama.container import UNMAPPED, LlamaEnds, LlamaLayer
from jaxgen_models.llama.model import LlamaForCausalLM
from jaxgen_models.policy import InferencePolicy


class LlamaPolicy(InferencePolicy):
    """LlamaForCausalLM with every rope_scaling kind, optional biases and tied heads."""

    family = "llama"
    architectures = ("LlamaForCausalLM", "LLaMAForCausalLM")
    model_types = ("llama",)
    decoder = LlamaForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """attention_bias and mlp_bias are absent in old configs and mean false."""
        # Some of the training programs of Llama-like models say so twice.
        hf.ignore("is_llama_config")
        hf.choice("activation", ("swiglu",), "swiglu")
        attention_bias = hf.flag("attention_bias", False)
        return read_decoder_config(
            hf,
            cls.family,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=hf.flag("mlp_bias", False),
            max_positions=2048,
            activation="silu",
        )

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, LlamaLayer, LlamaEnds, UNMAPPED)
