"""What every implementation may rely on: the weights fit together, or ValueError says what not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass
from jaxtyping import Array, Float

ACTIVATIONS = ("silu", "gelu_tanh")

type Leaf = Any
"""An array, or what stands for one in the same tree: ShapeDtypeStruct, PartitionSpec, sharding."""


@register_dataclass
@dataclass(frozen=True, slots=True)
class ChainWeights:
    """From one layer's attention to the next one's, all of one dtype.

    out [model, inner], mlp_norm [model], gate_up [2, ffn, model], down [model, ffn]; and of the
    next layer next_norm [model], qkv [fused, model] and where it has one qkv_bias [fused], None
    after the last layer. ahead: any weight that is read soon after, of which some may be brought
    near; the results are the same without it.
    """

    out: Leaf
    mlp_norm: Leaf
    gate_up: Leaf
    down: Leaf
    next_norm: Leaf = None
    qkv: Leaf = None
    qkv_bias: Leaf = None
    ahead: Leaf = None


@dataclass(frozen=True, slots=True)
class ChainProblem:
    """The static facts of one call, by which an implementation says whether it can serve."""

    rows: int
    inner: int
    model: int
    ffn: int
    fused: int | None
    bias: bool
    activation: str
    dtype: np.dtype

    def __str__(self) -> str:
        fused = "" if self.fused is None else f" -> {self.fused}"
        return (
            f"{self.rows} rows, {self.inner} -> {self.model} -> {self.ffn} -> {self.model}{fused}, "
            f"{self.activation}, {self.dtype}"
        )


def check(
    attended: Float[Array, "rows inner"],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    activation: str,
) -> ChainProblem:
    """The problem, or ValueError naming the argument, what was expected and what came."""
    problem = problem_of(residual, weights, activation)
    rows, inner, model = problem.rows, problem.inner, problem.model
    ffn, fused = problem.ffn, problem.fused
    if (weights.qkv is None) != (weights.next_norm is None):
        raise ValueError("next_norm and qkv must be given together, or neither.")
    if weights.qkv is None and weights.qkv_bias is not None:
        raise ValueError("qkv_bias was given without qkv.")
    expected = {
        "attended": (attended, (rows, inner)),
        "out": (weights.out, (model, inner)),
        "mlp_norm": (weights.mlp_norm, (model,)),
        "gate_up": (weights.gate_up, (2, ffn, model)),
        "down": (weights.down, (model, ffn)),
        "next_norm": (weights.next_norm, (model,)),
        "qkv": (weights.qkv, (fused, model)),
        "qkv_bias": (weights.qkv_bias, (fused,)),
    }
    check_fit(expected, (attended, residual, weights), activation)
    return problem


def check_fit(expected: Mapping[str, tuple[Leaf, tuple]], arrays: Any, activation: str) -> None:  # noqa: ANN401
    """ValueError unless all have the shapes expected of them by name, and one dtype."""
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} must be {shape} to fit the others, got {array.shape}.")
    dtypes = {jnp.dtype(leaf.dtype) for leaf in jax.tree.leaves(arrays)}
    if len(dtypes) > 1:
        raise ValueError(f"all arrays must have one dtype, got {sorted(map(str, dtypes))}.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}.")


def problem_of(
    residual: Float[Array, "rows model"], weights: ChainWeights, activation: str
) -> ChainProblem:
    """The static facts, of arguments that fit together."""
    rows, model = residual.shape
    return ChainProblem(
        rows=rows,
        inner=weights.out.shape[1],
        model=model,
        ffn=weights.gate_up.shape[1],
        fused=None if weights.qkv is None else weights.qkv.shape[0],
        bias=weights.qkv_bias is not None,
        activation=activation,
        dtype=jnp.dtype(residual.dtype),
    )
