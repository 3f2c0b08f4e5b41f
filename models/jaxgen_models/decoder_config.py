"""Reads the config keys that all Llama-like families share into a DecoderConfig."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from jaxgen_checkpoints.dim import Dim
from jaxgen_models.config import DecoderConfig
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.layers.activation import ACTIVATIONS
from jaxgen_models.rope_config import RopeConfig, read_rope

_DTYPES: Final = ("float32", "float16", "bfloat16")


def read_decoder_config(
    hf: HFConfig,
    family: str,
    *,
    windows: Callable[[HFConfig, int], tuple[int | None, ...]] | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    norm_eps: float = 1e-6,
    theta: float = 10000.0,
    tied: bool = False,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    max_positions: int | None = None,
    activation: str | None = None,
) -> DecoderConfig:
    """The config of a pre-norm decoder; every key is read here, by `windows`, or was read before.

    norm_eps to activation: as in Defaults.

    Raises:
      ConfigError: for a missing, malformed or contradictory key, or one that nothing reads.
    """
    fields = read_decoder_fields(
        hf,
        defaults=Defaults(
            norm_eps=norm_eps,
            theta=theta,
            tied=tied,
            head_dim=head_dim,
            kv_heads=kv_heads,
            max_positions=max_positions,
            activation=activation,
        ),
        windows=windows,
    )
    hf.finish(family)
    return DecoderConfig(
        **fields,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What an absent key means in a family, and how the family spells keys that have two names.

    head_dim: None is hidden_size / num_attention_heads. kv_heads: None is as many as heads.
    max_positions, activation: None for keys that must be there. rotated_part: None where the
    family has no partial_rotary_factor.
    """

    norm_eps: float = 1e-6
    theta: float = 10000.0
    tied: bool = False
    head_dim: int | None = None
    kv_heads: int | None = None
    max_positions: int | None = None
    activation: str | None = None
    rotated_part: float | None = None
    norm_eps_key: str = "rms_norm_eps"
    activation_key: str = "hidden_act"


def read_decoder_fields(
    hf: HFConfig,
    *,
    defaults: Defaults,
    windows: Callable[[HFConfig, int], tuple[int | None, ...]] | None = None,
    rope: Callable[[HFConfig, int, int], RopeConfig] | None = None,
) -> dict[str, Any]:
    """Fields of a DecoderConfig, for families that add some of their own. Call `hf.finish` after.

    windows: reads the sliding-window keys for a number of layers; without it all layers see
      everything. rope: reads the rope keys, given the head's width and the number of positions.
    """
    num_layers = hf.size("num_hidden_layers")
    model_dim = hf.size("hidden_size")
    heads = hf.size("num_attention_heads")
    absent = "num_key_value_heads" not in hf.raw and defaults.kv_heads
    kv_heads = hf.size("num_key_value_heads", absent or heads)
    if heads % kv_heads:
        raise hf.error(
            f"num_attention_heads = {heads} cannot be grouped evenly over "
            f"num_key_value_heads = {kv_heads}"
        )
    head = _head_dim(hf, model_dim, heads, defaults.head_dim)
    given = [] if defaults.max_positions is None else [defaults.max_positions]
    max_positions = int(hf.size("max_position_embeddings", *given))
    if rope is not None:
        rotation = rope(hf, int(head), max_positions)
    else:
        rotation = read_rope(
            hf, int(head), max_positions, defaults.theta, rotated_part=defaults.rotated_part
        )
    activation = [] if defaults.activation is None else [defaults.activation]
    return {
        "num_layers": num_layers,
        "model_dim": model_dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head,
        "ffn_dim": hf.size("intermediate_size"),
        "vocab_size": hf.size("vocab_size"),
        "norm_eps": hf.number(defaults.norm_eps_key, defaults.norm_eps),
        "activation": hf.choice(defaults.activation_key, tuple(ACTIVATIONS), *activation),
        "rope": rotation,
        "windows": windows(hf, num_layers) if windows else (None,) * int(num_layers),
        "max_context": rotation.context(max_positions),
        "tied": hf.flag("tie_word_embeddings", defaults.tied),
        "dtype": read_dtype(hf),
        "eos_token_ids": hf.token_ids("eos_token_id"),
        "bos_token_id": next(iter(hf.token_ids("bos_token_id")), None),
    }


def read_dtype(hf: HFConfig) -> str:
    """The type that the weights are stored in, under its old or its new key; float32 where
    absent.
    """
    key = "dtype" if hf.raw.get("dtype") is not None else "torch_dtype"
    return hf.choice(key, _DTYPES, "float32")


def _head_dim(hf: HFConfig, model_dim: Dim, heads: Dim, default: int | None) -> Dim:
    head_dim = hf.optional_size("head_dim", absent=default)
    if head_dim is None:
        if model_dim % heads:
            raise hf.error(
                f"hidden_size = {model_dim} is no multiple of num_attention_heads = {heads} "
                "and head_dim is not given"
            )
        head_dim = Dim(model_dim // heads, "hidden_size / num_attention_heads")
    if head_dim % 2:
        raise hf.error(f"head_dim = {head_dim} is odd; rotary embedding turns pairs of channels")
    return head_dim
