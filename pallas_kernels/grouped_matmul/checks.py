"""What every implementation of grouped products may rely on, or ValueError says what not."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True, slots=True)
class GroupedProblem:
    """The static facts of one call, by which an implementation says whether it can serve."""

    rows: int
    groups: int
    outputs: int
    inputs: int
    dtype: np.dtype
    weight_dtype: np.dtype

    def __str__(self) -> str:
        return (
            f"{self.rows} rows in {self.groups} groups, {self.inputs} to {self.outputs}, "
            f"{self.dtype} with {self.weight_dtype} weights"
        )


def check(
    x: Float[Array, "rows in"],
    weight: Float[Array, "groups out in"],
    group_sizes: Int[Array, " groups"],
) -> GroupedProblem:
    """The problem, or ValueError naming the argument, what was expected and what came."""
    if x.ndim != 2 or weight.ndim != 3:
        raise ValueError(
            f"x must be [rows, in] and weight [groups, out, in], got {x.shape} and {weight.shape}."
        )
    groups, outputs, inputs = weight.shape
    if x.shape[1] != inputs:
        raise ValueError(f"x has rows of {x.shape[1]}, the weights take rows of {inputs}.")
    if group_sizes.shape != (groups,) or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes must be int32 ({groups},), one a group, got {group_sizes.dtype} "
            f"{group_sizes.shape}."
        )
    return GroupedProblem(
        rows=x.shape[0],
        groups=groups,
        outputs=outputs,
        inputs=inputs,
        dtype=jnp.dtype(x.dtype),
        weight_dtype=jnp.dtype(weight.dtype),
    )
