"""How a Phi-3 checkpoint becomes a model."""

from types import MappingProxyType
from typing import ClassVar, Final

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import Defaults, read_decoder_fields
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.phi3.container import Phi3Ends, Phi3Layer
from jaxgen_models.phi3.model import Phi3ForCausalLM
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.rope_config import RopeConfig, read_rope
from jaxgen_models.window_config import Windows

# What longrope was called in this family before it had its name.
_ALIASES: Final = {"su": "longrope", "yarn": "longrope"}


class Phi3Policy(InferencePolicy):
    """Phi3ForCausalLM."""

    family = "phi3"
    architectures = ("Phi3ForCausalLM",)
    model_types = ("phi3",)
    refuses: ClassVar = MappingProxyType({"full_attn_mod": 2, "interpolate_factor": 2})
    decoder = Phi3ForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """original_max_position_embeddings stands outside rope_scaling, and counts if both do."""
        defaults = Defaults(norm_eps=1e-5, max_positions=4096, activation="silu")
        fields = read_decoder_fields(hf, defaults=defaults, windows=_windows, rope=_rope)
        for key in ("full_attn_mod", "interpolate_factor"):
            if hf.raw.get(key) not in (None, 1):
                raise hf.error(f"{key} = {hf.raw[key]!r} is not supported; expected 1")
            hf.ignore(key)
        hf.finish(cls.family)
        return DecoderConfig(**fields)

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, Phi3Layer, Phi3Ends, unmapped=[])


def _windows(hf: HFConfig, num_layers: int) -> Windows:
    """One window for all layers; none where the key is absent."""
    window = hf.optional_size("sliding_window")
    return (None if window is None else int(window),) * int(num_layers)


def _rope(hf: HFConfig, head_dim: int, positions: int) -> RopeConfig:
    rope = read_rope(
        hf,
        head_dim,
        positions,
        rotated_part=1.0,
        original_context=int(hf.size("original_max_position_embeddings", 4096)),
        aliases=_ALIASES,
    )
    if rope.kind not in ("default", "longrope"):
        raise hf.error(f"rope type {rope.kind} is not one of this family's; expected longrope")
    return rope
