"""Reads the config keys that all Llama-like families share into a DecoderConfig."""

from collections.abc import Callable
from typing import Final

from jaxgen_checkpoints.dim import Dim
from jaxgen_models.config import DecoderConfig
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.layers.activation import ACTIVATIONS
from jaxgen_models.rope_config import read_rope

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
) -> DecoderConfig:
    """The config of a pre-norm decoder; every key is read here, by `windows`, or was read before.

    Args:
      windows: reads the sliding-window keys for a number of layers; without it all layers see
        everything.
      norm_eps, theta, tied, head_dim: what an absent key means in this family; without a head_dim
        it is hidden_size / num_attention_heads.
    Raises:
      ConfigError: for a missing, malformed or contradictory key, or one that nothing reads.
    """
    num_layers = hf.size("num_hidden_layers")
    model_dim = hf.size("hidden_size")
    heads = hf.size("num_attention_heads")
    kv_heads = hf.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise hf.error(
            f"num_attention_heads = {heads} cannot be grouped evenly over "
            f"num_key_value_heads = {kv_heads}"
        )
    head = _head_dim(hf, model_dim, heads, head_dim)
    max_positions = int(hf.size("max_position_embeddings"))
    rope = read_rope(hf, int(head), max_positions, theta)
    config = DecoderConfig(
        num_layers=num_layers,
        model_dim=model_dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head,
        ffn_dim=hf.size("intermediate_size"),
        vocab_size=hf.size("vocab_size"),
        norm_eps=hf.number("rms_norm_eps", norm_eps),
        activation=hf.choice("hidden_act", tuple(ACTIVATIONS)),
        rope=rope,
        windows=windows(hf, num_layers) if windows else (None,) * int(num_layers),
        max_context=rope.context(max_positions),
        tied=hf.flag("tie_word_embeddings", tied),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=read_dtype(hf),
        eos_token_ids=hf.token_ids("eos_token_id"),
        bos_token_id=next(iter(hf.token_ids("bos_token_id")), None),
    )
    hf.finish(family)
    return config


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
