"""From GGUF metadata to the config.json and generation_config.json of the same architecture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxgen_checkpoints.errors import CheckpointError, ConfigError
from jaxgen_checkpoints.readers.gguf_header import GGUFHeader, MetadataValue
from jaxgen_checkpoints.readers.gguf_metadata import GGUFMetadata
from jaxgen_checkpoints.readers.gguf_names import ARCHITECTURES, Architecture
from jaxgen_checkpoints.readers.gguf_rope import rope_scaling

_DEFAULT_ROPE_THETA = 10000.0  # what llama.cpp takes where the key is absent
_ID_KEYS = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def architecture_of(path: Path, header: GGUFHeader) -> Architecture:
    """The architecture that the file names. Raises `ConfigError` for one that is not read."""
    key = GGUFMetadata(path, header).key
    if key not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: GGUF architecture {key!r:.80} is not read; "
            f"read are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[key]


def build_config(path: Path, header: GGUFHeader, rope_factors: np.ndarray | None) -> dict[str, Any]:
    """What config.json would hold. `rope_factors` is the file's `rope_freqs.weight`, if it has one.

    Raises `ConfigError` for a missing or wrong key, and for what these architectures do not have:
    experts, partial rotation, key and value heads of different size.
    """
    architecture, metadata = architecture_of(path, header), GGUFMetadata(path, header)
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{path}: one part of a GGUF that was split; expected it whole: join the parts with "
            "`llama-gguf-split --merge`"
        )
    if metadata.find("expert_count"):
        raise ConfigError(f"{path}: mixtures of experts are not read from GGUF; use safetensors")
    model_dim = metadata.size("embedding_length")
    heads = metadata.size("attention.head_count")
    head_dim = metadata.size("attention.key_length", max(1, model_dim // heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if metadata.size(name, head_dim) != head_dim:
            raise ConfigError(
                f"{path}: {metadata.key}.{name} is {metadata.find(name)}; expected the head size "
                f"{head_dim}"
            )
    theta = metadata.number("rope.freq_base", _DEFAULT_ROPE_THETA)
    config: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "hidden_act": "silu",
        "hidden_size": model_dim,
        "intermediate_size": metadata.size("feed_forward_length"),
        "max_position_embeddings": metadata.size("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": metadata.size("block_count"),
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(metadata, theta, head_dim, rope_factors),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": "float32",
        "vocab_size": _vocab_size(path, header),
    }
    if head_dim * heads != model_dim or architecture.model_type != "qwen2":
        config["head_dim"] = head_dim  # Qwen2's own configs do not have the key
    config |= _biases(architecture, header) | _window(metadata, architecture)
    return config | _token_ids(header.metadata)


def build_generation_config(header: GGUFHeader) -> dict[str, Any]:
    """What generation_config.json would hold: the special ids, every token that ends a text."""
    ids = _token_ids(header.metadata)
    ends = [header.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    ends = list(dict.fromkeys(end for end in ends if type(end) is int))
    if len(ends) > 1:
        ids["eos_token_id"] = ends
    return ids


def _vocab_size(path: Path, header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path}: expected a matrix token_embd.weight; the file has none")
    return embedding.shape[0]


def _biases(architecture: Architecture, header: GGUFHeader) -> dict[str, bool]:
    if architecture.model_type not in ("llama", "qwen3"):
        return {}
    biases = {"attention_bias": "blk.0.attn_q.bias" in header.tensors}
    if architecture.model_type == "llama":
        biases["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    return biases


def _window(metadata: GGUFMetadata, architecture: Architecture) -> dict[str, Any]:
    """The sliding window; Mistral's default is not none, so its absence must be said."""
    window = metadata.find("attention.sliding_window")
    if architecture.model_type == "mistral":
        return {"sliding_window": window or None}
    if not window:
        return {}
    raise ConfigError(
        f"{metadata.path}: {metadata.key}.attention.sliding_window is {window!r:.80}, which "
        f"{architecture.name} does not have in GGUF; use the safetensors checkpoint"
    )


def _token_ids(metadata: Mapping[str, MetadataValue]) -> dict[str, Any]:
    keys = {**_ID_KEYS, "eos_token_id": "eos_token_id"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in keys.items()}
    return {name: value for name, value in found.items() if type(value) is int}
