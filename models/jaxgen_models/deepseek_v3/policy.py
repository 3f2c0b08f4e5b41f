"""How a DeepSeek-V3 checkpoint becomes a model."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.dim import Dim
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import Defaults
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.deepseek_v3.container import (
    DeepseekV3DenseLayer,
    DeepseekV3Ends,
    DeepseekV3Layer,
)
from jaxgen_models.deepseek_v3.model import DeepseekV3ForCausalLM
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

_DEFAULTS: Final = Defaults(kv_heads=128, max_positions=4096, activation="silu")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Config(LatentMoEConfig):
    """predicting_layers: layers behind the last that predict further tokens, and are not used."""

    predicting_layers: int


class DeepseekV3Policy(LatentPolicy):
    """DeepseekV3ForCausalLM."""

    family = "deepseek_v3"
    architectures = ("DeepseekV3ForCausalLM",)
    model_types = ("deepseek_v3",)
    refuses: ClassVar = MappingProxyType(
        {"scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 2}
    )
    decoder = DeepseekV3ForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """The choice of experts is always limited by groups, be it by one group of all."""
        num_experts = read_num_experts(
            hf, "n_routed_experts", "num_local_experts", "num_experts", default=256
        )
        router = read_router(hf, num_experts)
        fields = read_latent_fields(hf, _DEFAULTS)
        expert_ffn_dim = hf.size("moe_intermediate_size", 2048)
        config = DeepseekV3Config(
            **fields,
            rope_interleaved=hf.flag("rope_interleave", True),
            num_experts=num_experts,
            expert_ffn_dim=expert_ffn_dim,
            shared_ffn_dim=read_shared_width(hf, 1, expert_ffn_dim),
            router=router,
            sparse=leading_dense_layers(hf, int(fields["num_layers"]), absent=3),
            predicting_layers=read_predicting_layers(hf),
        )
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        config = self.config
        assert isinstance(config, DeepseekV3Config)
        layers = layer_kinds(config, DeepseekV3DenseLayer, DeepseekV3Layer)
        unused = [
            f"model.layers.{config.num_layers + i}.**" for i in range(config.predicting_layers)
        ]
        return llama_like_map(config, layers, DeepseekV3Ends, unmapped=unused)


def read_router(hf: HFConfig, num_experts: Dim) -> RouterConfig:
    """Sigmoid scores; a group is worth its best two experts."""
    hf.choice("scoring_func", ("sigmoid",), "sigmoid")
    hf.choice("topk_method", ("noaux_tc",), "noaux_tc")
    top_k = read_top_k(hf, 8, num_experts)
    groups, top_groups = read_groups(hf, num_experts, top_k, best=2, defaults=(8, 4))
    return RouterConfig(
        top_k=top_k,
        scoring="sigmoid",
        groups=groups,
        top_groups=top_groups,
        group_score="top2",
        normalise=hf.flag("norm_topk_prob", True),
        scale=hf.number("routed_scaling_factor", 2.5),
    )


def read_predicting_layers(hf: HFConfig) -> int:
    """Layers for further tokens that the checkpoint may hold; one where the config does not say."""
    name = "num_mtp_layers" if "num_mtp_layers" in hf.raw else "num_nextn_predict_layers"
    count = hf.raw.get(name)
    if count is None:
        return 1
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise hf.error(f"{name} must be a number of layers, got {count!r}")
    return count
