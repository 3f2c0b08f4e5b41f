"""How a Mixtral checkpoint becomes a model."""

from functools import partial
from typing import Final

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import Defaults, read_decoder_fields
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.mixtral.container import MixtralEnds, MixtralLayer
from jaxgen_models.mixtral.model import MixtralForCausalLM
from jaxgen_models.moe_config import (
    IGNORED_MOE_KEYS,
    MoEConfig,
    RouterConfig,
    read_num_experts,
    read_top_k,
)
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.window_config import every_layer_windows

_DEFAULTS: Final = Defaults(
    norm_eps=1e-5, theta=1e6, kv_heads=8, max_positions=4096 * 32, activation="silu"
)


class MixtralPolicy(InferencePolicy):
    """MixtralForCausalLM."""

    family = "mixtral"
    architectures = ("MixtralForCausalLM",)
    model_types = ("mixtral",)
    decoder = MixtralForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """intermediate_size is the width of an expert; there is no window unless one is given."""
        num_experts = read_num_experts(hf, "num_local_experts", "num_experts", default=8)
        router = RouterConfig(top_k=read_top_k(hf, 2, num_experts), normalise=True)
        fields = read_decoder_fields(
            hf, defaults=_DEFAULTS, windows=partial(every_layer_windows, absent=None)
        )
        hf.ignore(*IGNORED_MOE_KEYS)
        hf.finish(cls.family)
        return MoEConfig(
            **fields,
            num_experts=num_experts,
            expert_ffn_dim=fields["ffn_dim"],
            router=router,
            sparse=(True,) * int(fields["num_layers"]),
        )

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, MixtralLayer, MixtralEnds, unmapped=[])
