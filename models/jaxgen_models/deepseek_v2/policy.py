"""How a DeepSeek-V2 checkpoint becomes a model."""

from types import MappingProxyType
from typing import ClassVar, Final

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.dim import Dim
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import Defaults
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.deepseek_v2.container import (
    DeepseekV2DenseLayer,
    DeepseekV2Ends,
    DeepseekV2Layer,
)
from jaxgen_models.deepseek_v2.model import DeepseekV2ForCausalLM
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.latent_config import (
    LatentMoEConfig,
    leading_dense_layers,
    read_latent_fields,
    read_shared_width,
)
from jaxgen_models.latent_decoder import LatentPolicy
from jaxgen_models.moe_config import RouterConfig, read_groups, read_num_experts, read_top_k
from jaxgen_models.moe_container import layer_kinds

_DEFAULTS: Final = Defaults(max_positions=2048, activation="silu")


class DeepseekV2Policy(LatentPolicy):
    """DeepseekV2ForCausalLM."""

    family = "deepseek_v2"
    architectures = ("DeepseekV2ForCausalLM",)
    model_types = ("deepseek_v2",)
    refuses: ClassVar = MappingProxyType(
        {
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 2,
            "mlp_bias": True,
        }
    )
    decoder = DeepseekV2ForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """topk_method says whether groups of experts limit the choice."""
        num_experts = read_num_experts(hf, "n_routed_experts", "num_experts", default=64)
        router = read_router(hf, num_experts)
        fields = read_latent_fields(hf, _DEFAULTS)
        expert_ffn_dim = hf.size("moe_intermediate_size", 1407)
        config = LatentMoEConfig(
            **fields,
            num_experts=num_experts,
            expert_ffn_dim=expert_ffn_dim,
            shared_ffn_dim=read_shared_width(hf, 2, expert_ffn_dim),
            router=router,
            sparse=leading_dense_layers(hf, int(fields["num_layers"]), absent=0),
        )
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        assert isinstance(self.config, LatentMoEConfig)
        layers = layer_kinds(self.config, DeepseekV2DenseLayer, DeepseekV2Layer)
        return llama_like_map(self.config, layers, DeepseekV2Ends, unmapped=[])


def read_router(hf: HFConfig, num_experts: Dim) -> RouterConfig:
    """Softmax over all experts. norm_topk_prob is refused: the authors' code and transformers do
    not mean the same by it, and no published checkpoint has it.
    """
    hf.choice("scoring_func", ("softmax",), "softmax")
    if hf.flag("norm_topk_prob", False):
        raise hf.error("norm_topk_prob = true has no agreed meaning in the deepseek_v2 family")
    top_k = read_top_k(hf, None, num_experts)
    method = hf.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    scale = hf.number("routed_scaling_factor", 1.0)
    if method == "greedy":
        hf.ignore("n_group", "topk_group")
        return RouterConfig(top_k=top_k, scale=scale)
    groups, top_groups = read_groups(hf, num_experts, top_k, best=1)
    return RouterConfig(top_k=top_k, scale=scale, groups=groups, top_groups=top_groups)
