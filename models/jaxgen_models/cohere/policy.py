"""How a Cohere checkpoint becomes a model."""

from dataclasses import replace

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.cohere.config import CohereConfig
from jaxgen_models.cohere.container import CohereEnds, CohereLayer
from jaxgen_models.cohere.model import CohereForCausalLM
from jaxgen_models.decoder_config import Defaults, read_decoder_fields
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.rope_config import RopeConfig, read_rope


class CoherePolicy(InferencePolicy):
    """CohereForCausalLM (Command R)."""

    family = "cohere"
    architectures = ("CohereForCausalLM",)
    model_types = ("cohere",)
    decoder = CohereForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> CohereConfig:
        """attention_bias covers q, k, v and o."""
        bias = hf.flag("attention_bias", False)
        defaults = Defaults(
            norm_eps=1e-5,
            norm_eps_key="layer_norm_eps",
            tied=True,
            max_positions=8192,
            activation="silu",
        )
        fields = read_decoder_fields(hf, defaults=defaults, rope=_rope)
        config = CohereConfig(
            **fields,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=hf.flag("use_qk_norm", False),
            logit_scale=hf.number("logit_scale", 0.0625),
        )
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, CohereLayer, CohereEnds, unmapped=[])


def _rope(hf: HFConfig, head_dim: int, positions: int) -> RopeConfig:
    return replace(read_rope(hf, head_dim, positions, 500_000.0), interleaved=True)
