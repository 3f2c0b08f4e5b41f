"""How an OLMo 2 checkpoint becomes a model."""

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import Defaults, read_decoder_fields
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.olmo2.container import Olmo2Ends, Olmo2Layer
from jaxgen_models.olmo2.model import Olmo2ForCausalLM
from jaxgen_models.policy import InferencePolicy


class Olmo2Policy(InferencePolicy):
    """Olmo2ForCausalLM."""

    family = "olmo2"
    architectures = ("Olmo2ForCausalLM",)
    model_types = ("olmo2",)
    decoder = Olmo2ForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """attention_bias covers q, k, v and o."""
        bias = hf.flag("attention_bias", False)
        defaults = Defaults(norm_eps=1e-5, max_positions=2048, activation="silu")
        fields = read_decoder_fields(hf, defaults=defaults)
        hf.finish(cls.family)
        return DecoderConfig(**fields, qkv_bias=bias, output_bias=bias, qk_norm=True)

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, Olmo2Layer, Olmo2Ends, unmapped=[])
