"""Maps an unknown architecture by its structure, when its tensor names and config are Llama-like.

What biases and head norms there are is read off the tensors. The map must be complete in both
directions: a tensor or a config key that has no place in the structure refuses the checkpoint.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.errors import ConfigError
from jaxgen_checkpoints.source import TensorInfo
from jaxgen_models.auto.container import AutoLayer
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import read_decoder_config
from jaxgen_models.decoder_container import DecoderEnds, llama_like_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.window_config import layer_type_windows

_BLOCK: Final = "model.layers.0."
_NEEDED: Final = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    _BLOCK + "input_layernorm.weight",
    _BLOCK + "post_attention_layernorm.weight",
    _BLOCK + "self_attn.q_proj.weight",
    _BLOCK + "self_attn.k_proj.weight",
    _BLOCK + "self_attn.v_proj.weight",
    _BLOCK + "self_attn.o_proj.weight",
    _BLOCK + "mlp.gate_proj.weight",
    _BLOCK + "mlp.up_proj.weight",
    _BLOCK + "mlp.down_proj.weight",
)


def looks_like_llama(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether the first block and the ends have the names of a Llama-like decoder."""
    return all(name in tensors for name in _NEEDED)


class AutoPolicy(InferencePolicy):
    """No architecture of its own: `from_structure` is the only way in."""

    family: ClassVar[str] = "auto"
    strict: ClassVar[bool] = True

    @classmethod
    def from_structure(cls, hf: HFConfig, tensors: Mapping[str, TensorInfo]) -> "AutoPolicy":
        """Reads config and tensors together; refuses with what is missing or left over."""
        missing = [name for name in _NEEDED if name not in tensors]
        if missing:
            raise ConfigError(
                f"policy auto: {hf.architecture} is not Llama-like: no {', '.join(missing[:4])}"
            )
        attention_bias = _BLOCK + "self_attn.q_proj.bias" in tensors
        output_bias = _BLOCK + "self_attn.o_proj.bias" in tensors
        mlp_bias = _BLOCK + "mlp.gate_proj.bias" in tensors
        hf.ignore("attention_bias", "mlp_bias")
        config = read_decoder_config(
            hf,
            cls.family,
            windows=_explicit_windows,
            qkv_bias=attention_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            qk_norm=_BLOCK + "self_attn.q_norm.weight" in tensors,
            tied="lm_head.weight" not in tensors,
        )
        return cls(config)

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """Refused: the tensors decide on half of the switches."""
        raise hf.error("policy auto needs the checkpoint's tensors; use from_structure")

    def build_container_map(self) -> ContainerMap:
        """The Llama-like map with every optional part that the tensors showed."""
        return llama_like_map(self.config, AutoLayer, DecoderEnds, unmapped=[])


def _explicit_windows(hf: HFConfig, num_layers: int) -> tuple[int | None, ...]:
    window = hf.optional_size("sliding_window")
    # Where such a switch is on, nothing here says which layers it means: the key stays unread.
    if hf.raw.get("use_sliding_window") is False:
        hf.ignore("max_window_layers")
        window = None
    width = None if window is None else int(window)
    return layer_type_windows(hf, num_layers, width) or (width,) * int(num_layers)
