"""How a Granite checkpoint becomes a model."""

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.decoder_config import Defaults, read_decoder_fields
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.granite.config import GraniteConfig
from jaxgen_models.granite.container import GraniteEnds, GraniteLayer
from jaxgen_models.granite.model import GraniteForCausalLM
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.policy import InferencePolicy


class GranitePolicy(InferencePolicy):
    """GraniteForCausalLM (dense)."""

    family = "granite"
    architectures = ("GraniteForCausalLM",)
    model_types = ("granite",)
    decoder = GraniteForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> GraniteConfig:
        """Every absent multiplier is 1, that of the scores too."""
        bias = hf.flag("attention_bias", False)
        fields = read_decoder_fields(hf, defaults=Defaults(max_positions=2048, activation="silu"))
        config = GraniteConfig(
            **fields,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=hf.flag("mlp_bias", False),
            embedding_multiplier=hf.number("embedding_multiplier", 1.0),
            residual_multiplier=hf.number("residual_multiplier", 1.0),
            attention_multiplier=hf.number("attention_multiplier", 1.0),
            logits_scaling=hf.number("logits_scaling", 1.0),
        )
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, GraniteLayer, GraniteEnds, unmapped=[])
