"""Rotary scaling in GGUF, as the `rope_scaling` object that config.json would hold.

Llama 3's scaling is in no metadata key: the converter multiplies it out into a tensor of one factor
per rotary pair. Its parameters are found again by computing that tensor from the published ones.
"""

import math
from typing import Any

import numpy as np

from jaxgen_checkpoints.errors import ConfigError
from jaxgen_checkpoints.readers.gguf_metadata import GGUFMetadata

ROPE_FACTORS_NAME = "rope_freqs.weight"
# What every published Llama 3.x has; only `factor` and the original length differ.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR = 1.0, 4.0
_ORIGINAL_LENGTHS = tuple(2**power for power in range(11, 18))
_YARN_KEYS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
_UNREAD_KEYS = ("attn_factor", "yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor")


def rope_scaling(
    metadata: GGUFMetadata, theta: float, head_dim: int, factors: np.ndarray | None
) -> dict[str, Any] | None:
    """The `rope_scaling` of a file; `factors` [head_dim/2] is its `rope_freqs.weight`, if any.

    Raises `ConfigError` for a kind of scaling that is not read, and for factors that are not
    Llama 3's.
    """
    kind, factor_key = metadata.find("rope.scaling.type") or "none", "rope.scaling.factor"
    if kind == "none" and metadata.find("rope.scale_linear") not in (None, 1.0):
        kind, factor_key = "linear", "rope.scale_linear"  # as files before 2024 say it
    if factors is not None:
        if kind != "none":
            raise ConfigError(
                f"{metadata.path}: both {ROPE_FACTORS_NAME} and rope scaling {kind!r:.80}; "
                "expected one"
            )
        return _llama3(metadata, theta, head_dim, factors)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.number(factor_key)}
    if kind == "yarn":
        return _yarn(metadata)
    raise ConfigError(
        f"{metadata.path}: rope scaling {kind!r:.80} is not read from GGUF; read are linear, "
        "yarn and Llama 3's"
    )


def llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> np.ndarray:
    """What Llama 3's scaling divides each rotary frequency by: float64 [head_dim/2].

    Wavelengths shorter than a quarter of the original length stay (1), longer than it are stretched
    (`factor`), between them it is interpolated.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = original / wavelengths
    smooth = (turns - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR)
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama3(
    metadata: GGUFMetadata, theta: float, head_dim: int, factors: np.ndarray
) -> dict[str, Any]:
    if factors.shape == (head_dim // 2,) and np.isfinite(factors).all() and factors.max() >= 1:
        factor = float(factors.max())
        for original in _ORIGINAL_LENGTHS:
            expected = llama3_factors(theta, head_dim, factor, original)
            if np.allclose(factors, expected, rtol=1e-4, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": _LOW_FREQ_FACTOR,
                    "high_freq_factor": _HIGH_FREQ_FACTOR,
                    "original_max_position_embeddings": original,
                }
    raise ConfigError(
        f"{metadata.path}: {ROPE_FACTORS_NAME} holds rotary factors of a kind that is not read; "
        "expected those of Llama 3 scaling"
    )


def _yarn(metadata: GGUFMetadata) -> dict[str, Any]:
    unread = [key for key in _UNREAD_KEYS if metadata.find(f"rope.scaling.{key}") is not None]
    if unread:
        raise ConfigError(
            f"{metadata.path}: YaRN scaling with {', '.join(unread)} is not read from GGUF"
        )
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": metadata.number("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.size("rope.scaling.original_context_length"),
    }
    for key, name in _YARN_KEYS.items():
        if metadata.find(f"rope.scaling.{key}") is not None:
            scaling[name] = metadata.number(f"rope.scaling.{key}")
    return scaling
