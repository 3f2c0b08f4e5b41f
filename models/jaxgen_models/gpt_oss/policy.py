"""How a GPT-OSS checkpoint becomes a model."""

from types import MappingProxyType
from typing import Any, ClassVar, Final

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import Defaults, read_decoder_fields
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.gpt_oss.config import GptOssConfig
from jaxgen_models.gpt_oss.container import GptOssEnds, GptOssLayer
from jaxgen_models.gpt_oss.model import GptOssForCausalLM
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.moe_config import (
    IGNORED_MOE_KEYS,
    RouterConfig,
    read_num_experts,
    read_top_k,
)
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.rope_config import RopeConfig, read_rope, read_rope_table
from jaxgen_models.window_config import Windows, hybrid_windows

_DEFAULTS: Final = Defaults(
    norm_eps=1e-5,
    theta=150000.0,
    head_dim=64,
    kv_heads=8,
    max_positions=131072,
    activation="silu",
)
_DEFAULT_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssPolicy(InferencePolicy):
    """GptOssForCausalLM, in bfloat16 or MXFP4."""

    family = "gpt_oss"
    architectures = ("GptOssForCausalLM",)
    model_types = ("gpt_oss",)
    refuses: ClassVar = MappingProxyType({"hidden_act": "gelu"})
    decoder = GptOssForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """intermediate_size is the width of an expert; an absent rope_scaling is yarn's."""
        num_experts = read_num_experts(hf, "num_local_experts", "num_experts", default=128)
        # A softmax over the chosen logits alone is one over all of them, normalised.
        router = RouterConfig(top_k=read_top_k(hf, 4, num_experts), normalise=True)
        hf.choice("hidden_act", ("silu",), "silu")
        fields = read_decoder_fields(hf, defaults=_DEFAULTS, windows=windows, rope=rope)
        bias = hf.flag("attention_bias", True)
        config = GptOssConfig(
            **fields,
            qkv_bias=bias,
            output_bias=bias,
            num_experts=num_experts,
            expert_ffn_dim=fields["ffn_dim"],
            router=router,
            sparse=(True,) * int(fields["num_layers"]),
            swiglu_alpha=hf.number("swiglu_alpha", 1.702),
            swiglu_limit=hf.number("swiglu_limit", 7.0),
        )
        hf.spelling("num_experts_per_tok", "experts_per_token")
        hf.ignore(*IGNORED_MOE_KEYS, "initial_context_length")
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, GptOssLayer, GptOssEnds, unmapped=[])


def windows(hf: HFConfig, num_layers: int) -> Windows:
    """Even layers look through the window unless layer_types says otherwise."""
    return hybrid_windows(hf, num_layers, absent=128, period=2)


def rope(hf: HFConfig, head_dim: int, max_positions: int) -> RopeConfig:
    """yarn with a stretch of 32 where the config has no table."""
    tables = ("rope_parameters", "rope_scaling")
    if all(hf.table(name) is None for name in tables):
        theta = hf.number("rope_theta", _DEFAULTS.theta)
        return read_rope_table(hf, "rope_scaling", _DEFAULT_ROPE, head_dim, max_positions, theta)
    return read_rope(hf, head_dim, max_positions, _DEFAULTS.theta)
