"""How a Phi checkpoint becomes a model."""

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import Defaults, read_decoder_fields
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.phi.container import UNMAPPED, PhiEnds, PhiLayer
from jaxgen_models.phi.model import PhiForCausalLM
from jaxgen_models.policy import InferencePolicy


class PhiPolicy(InferencePolicy):
    """PhiForCausalLM (Phi-1, 1.5 and 2)."""

    family = "phi"
    architectures = ("PhiForCausalLM",)
    model_types = ("phi",)
    decoder = PhiForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """Half of each head rotates unless partial_rotary_factor says otherwise."""
        defaults = Defaults(
            norm_eps=1e-5,
            norm_eps_key="layer_norm_eps",
            max_positions=2048,
            activation="gelu_new",
            rotated_part=0.5,
        )
        fields = read_decoder_fields(hf, defaults=defaults)
        qk_norm = hf.flag("qk_layernorm", False)
        hf.finish(cls.family)
        return DecoderConfig(
            **fields, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=qk_norm
        )

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.final_layernorm and lm_head."""
        return llama_like_map(self.config, PhiLayer, PhiEnds, UNMAPPED)
