"""Inputs of the chain at small sizes, and what must come out, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layer_chain import ChainWeights


def make(
    rows: int,
    *,
    inner: int = 512,
    model: int = 512,
    ffn: int = 1024,
    fused: int | None = 256,
    bias: bool = False,
    dtype: Any = jnp.bfloat16,
) -> tuple[jax.Array, jax.Array, ChainWeights]:
    """attended, residual and weights whose products keep the size of their inputs."""
    random = np.random.default_rng(rows + ffn)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> jax.Array:
        return jnp.asarray(random.normal(mean, scale, shape), dtype)

    weights = ChainWeights(
        out=normal(model, inner, scale=inner**-0.5),
        mlp_norm=normal(model, mean=1.0, scale=0.2),
        gate_up=normal(2, ffn, model, scale=model**-0.5),
        down=normal(model, ffn, scale=ffn**-0.5),
        next_norm=None if fused is None else normal(model, mean=1.0, scale=0.2),
        qkv=None if fused is None else normal(fused, model, scale=model**-0.5),
        qkv_bias=normal(fused) if fused is not None and bias else None,
    )
    return normal(rows, inner), normal(rows, model), weights


def oracle(
    attended: jax.Array, residual: jax.Array, weights: ChainWeights, eps: float, activation: str
) -> tuple[np.ndarray, np.ndarray | None]:
    """The chain in float64, nothing rounded on the way."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight

    def act(x: np.ndarray) -> np.ndarray:
        if activation == "silu":
            return x / (1 + np.exp(-x))
        return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2

    x = np.asarray(residual, np.float64) + np.asarray(attended, np.float64) @ wide.out.T
    normed = norm(x, wide.mlp_norm)
    x = x + (act(normed @ wide.gate_up[0].T) * (normed @ wide.gate_up[1].T)) @ wide.down.T
    if wide.qkv is None:
        return x, None
    fused = norm(x, wide.next_norm) @ wide.qkv.T
    return x, (fused if wide.qkv_bias is None else fused + wide.qkv_bias)


def difference(got: jax.Array, want: np.ndarray) -> float:
    """Relative error of the norm; NaN where anything is NaN."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))
