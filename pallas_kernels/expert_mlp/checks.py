"""What every implementation of the experts' blocks may rely on, or ValueError says what not."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Gate = Callable[[Array, Array], Array]
"""(gate, up) -> hidden, elementwise."""


@dataclass(frozen=True, slots=True)
class ExpertsProblem:
    """The static facts of one call, by which an implementation says whether it can serve.

    spread: over how many shards the experts that tokens choose from are spread evenly.
    """

    tokens: int
    top_k: int
    experts: int
    model: int
    ffn: int
    dtype: np.dtype
    weight_dtype: np.dtype
    gate: Gate
    spread: int = 1

    @property
    def visits(self) -> float:
        """How many tokens an expert is likely to have."""
        return self.tokens * self.top_k / (self.experts * self.spread)

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens to {self.top_k} of {self.experts} experts of {self.ffn}, model "
            f"{self.model}, {self.dtype} with {self.weight_dtype} weights"
        )


def check(
    x: Float[Array, "tokens model"],
    experts: Int[Array, "tokens top_k"],
    shares: Float[Array, "tokens top_k"],
    gate_up: Float[Array, "experts 2 ffn model"],
    down: Float[Array, "experts model ffn"],
    bias: Float[Array, "experts 2 ffn"] | None,
    gate: Gate,
    spread: int = 1,
) -> ExpertsProblem:
    """The problem, or ValueError naming the argument, what was expected and what came."""
    if x.ndim != 2 or gate_up.ndim != 4 or gate_up.shape[1] != 2:
        raise ValueError(
            "x must be [tokens, model] and gate_up [experts, 2, ffn, model], got "
            f"{x.shape} and {gate_up.shape}."
        )
    tokens, model = x.shape
    local, _, ffn, inputs = gate_up.shape
    if inputs != model or down.shape != (local, model, ffn):
        raise ValueError(
            f"gate_up {gate_up.shape} with x {x.shape} takes gate_up [..., {model}] and down "
            f"{(local, model, ffn)}, got down {down.shape}."
        )
    if experts.ndim != 2 or experts.shape[0] != tokens or experts.dtype != jnp.int32:
        raise ValueError(
            f"experts must be int32 ({tokens}, top_k), got {experts.dtype} {experts.shape}."
        )
    if shares.shape != experts.shape:
        raise ValueError(f"shares must be like experts, {experts.shape}, got {shares.shape}.")
    if bias is not None and bias.shape != (local, 2, ffn):
        raise ValueError(f"bias must be {(local, 2, ffn)}, got {bias.shape}.")
    return ExpertsProblem(
        tokens=tokens,
        top_k=experts.shape[1],
        experts=local,
        model=model,
        ffn=ffn,
        dtype=jnp.dtype(x.dtype),
        weight_dtype=jnp.dtype(gate_up.dtype),
        gate=gate,
        spread=spread,
    )
