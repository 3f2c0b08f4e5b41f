"""Inputs of the mixture chain at small sizes, and what must come out, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_mlp.choice import ChoiceProblem
from pallas_kernels.mixture_chain import MixtureWeights


def choice(experts: int = 64, top_k: int = 3, **changes: Any) -> ChoiceProblem:
    """How a token chooses."""
    plain = {
        "softmax": True,
        "groups": 1,
        "top_groups": 1,
        "group_best": 1,
        "normalise": True,
        "scale": 1.5,
    }
    return ChoiceProblem(tokens=1, experts=experts, top_k=top_k, **(plain | changes))


def make(
    problem: ChoiceProblem,
    *,
    inner: int = 512,
    model: int = 512,
    ffn: int = 64,
    shared: int = 0,
    fused: int | None = 272,
    dtype: Any = jnp.bfloat16,
    seed: int = 0,
) -> tuple[jax.Array, jax.Array, MixtureWeights]:
    """attended, residual and weights whose products keep the size of their inputs."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, mean: float = 0.0) -> jax.Array:
        scale = 0.2 if mean else shape[-1] ** -0.5
        return jnp.asarray(random.standard_normal(shape, np.float32) * scale + mean, dtype)

    weights = MixtureWeights(
        out=normal(model, inner),
        mlp_norm=normal(model, mean=1.0),
        router=normal(problem.experts, model),
        gate_up=normal(problem.experts, 2, ffn, model),
        down=normal(problem.experts, model, ffn),
        shared_gate_up=normal(2, shared, model) if shared else None,
        shared_down=normal(model, shared) if shared else None,
        next_norm=None if fused is None else normal(model, mean=1.0),
        following=None if fused is None else normal(fused, model),
    )
    attended, residual = (random.standard_normal((1, n), np.float32) for n in (inner, model))
    return jnp.asarray(attended, dtype), jnp.asarray(residual, dtype), weights


def oracle(
    attended: jax.Array,
    residual: jax.Array,
    weights: MixtureWeights,
    problem: ChoiceProblem,
    eps: float,
) -> tuple[np.ndarray, np.ndarray | None]:
    """The chain in float64 with SiLU, nothing rounded on the way."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + eps) * weight

    def expert(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
        gate, up = gate_up @ x
        return down @ (gate / (1 + np.exp(-gate)) * up)

    x = np.asarray(residual, np.float64)[0] + wide.out @ np.asarray(attended, np.float64)[0]
    normed = norm(x, wide.mlp_norm)
    logits = wide.router @ normed
    scores = 1 / (1 + np.exp(-logits))
    if problem.softmax:
        scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    best = np.argsort(-scores)[: problem.top_k]
    shares = scores[best] / (scores[best].sum() if problem.normalise else 1) * problem.scale
    for which, share in zip(best, shares, strict=True):
        x = x + share * expert(normed, wide.gate_up[which], wide.down[which])
    if wide.shared_gate_up is not None:
        x = x + expert(normed, wide.shared_gate_up, wide.shared_down)
    if wide.following is None:
        return x, None
    return x, wide.following @ norm(x, wide.next_norm)


def difference(got: jax.Array, want: np.ndarray) -> float:
    """Relative error of the norm; NaN where anything is NaN."""
    return float(np.linalg.norm(np.asarray(got, np.float64)[0] - want) / np.linalg.norm(want))
