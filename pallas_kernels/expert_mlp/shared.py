"""The expert that every token visits, where a layer has one."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.expert_mlp.checks import Gate
from pallas_kernels.product import product


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SharedExpert:
    """gate_up [2, shared_ffn, model], down [model, shared_ffn], arrays or what stands for them.

    share: what its output is multiplied by, float32 [tokens]; None for 1.
    """

    gate_up: Any
    down: Any
    share: Any = None


def visit(
    x: Float[Array, "tokens model"], shared: SharedExpert, gate: Gate
) -> Float[Array, "tokens model"]:
    """Its output times its share, in x's dtype."""
    _, ffn, model = shared.gate_up.shape
    hidden = product(x, shared.gate_up.reshape(2 * ffn, model)).reshape(-1, 2, ffn)
    out = product(gate(hidden[:, 0], hidden[:, 1]), shared.down)
    if shared.share is None:
        return out
    return (out.astype(jnp.float32) * shared.share[:, None]).astype(x.dtype)
