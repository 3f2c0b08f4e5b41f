"""The routed experts of a layer: tokens sorted by expert, two grouped products, and back.

No expert has a capacity: every token reaches every expert that it has chosen.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxgen_models.layers.collective import EXPERT_AXIS
from jaxgen_models.layers.gating import Gating
from jaxgen_models.layers.router import Chosen
from pallas_kernels.grouped_matmul import grouped_matmul


class Experts(nnx.Module):
    """This shard's experts, and its part of their hidden layers.

    weights: experts_gate_up [experts, 2, ffn, model], experts_down [experts, model, ffn], and where
    the config has biases experts_gate_up_bias [experts, 2, ffn] and experts_down_bias
    [all experts, model].
    """

    def __init__(self, weights: Mapping[str, Any], gating: Gating) -> None:
        self.gate_up = nnx.Param(weights["experts_gate_up"])
        self.down = nnx.Param(weights["experts_down"])
        self.gate_up_bias = _optional(weights, "experts_gate_up_bias")
        self.down_bias = _optional(weights, "experts_down_bias")
        self.gating = gating

    def partial(
        self, x: Float[Array, "tokens model"], chosen: Chosen, live: Bool[Array, " tokens"]
    ) -> Float[Array, "tokens model"]:
        """This shard's part of the sum over experts and over the hidden layer, without `bias`.

        Tokens that are not live go to no expert: padding reads no weights.
        """
        weight = self.gate_up[...]
        local, _, ffn, model = weight.shape
        tokens, top_k = chosen.experts.shape
        expert = chosen.experts - jax.lax.axis_index(EXPERT_AXIS) * local
        mine = (expert >= 0) & (expert < local) & live[:, None]
        expert = jnp.where(mine, expert, local).reshape(-1)
        order = jnp.argsort(expert)
        sizes = (expert[:, None] == jnp.arange(local)).sum(axis=0, dtype=jnp.int32)
        rows = x[order // top_k]
        hidden = grouped_matmul(rows, weight.reshape(local, 2 * ffn, model), sizes)
        hidden = self._gated(hidden.reshape(-1, 2, ffn), expert[order])
        out = grouped_matmul(hidden, self.down[...], sizes)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
        out = out[place].reshape(tokens, top_k, model)
        shares = jnp.where(mine, chosen.shares, 0)
        return (shares[:, :, None] * out.astype(jnp.float32)).sum(axis=1).astype(x.dtype)

    def bias(self, chosen: Chosen) -> Float[Array, "tokens model"] | None:
        """What the experts' output biases add, once over all shards."""
        if self.down_bias is None:
            return None
        each = self.down_bias[...][chosen.experts]
        summed = (chosen.shares[:, :, None] * each.astype(jnp.float32)).sum(axis=1)
        return summed.astype(each.dtype)

    def _gated(
        self, hidden: Float[Array, "rows 2 ffn"], expert: Int[Array, " rows"]
    ) -> Float[Array, "rows ffn"]:
        if self.gate_up_bias is not None:
            hidden = hidden + self.gate_up_bias[...].at[expert].get(mode="clip")
        return self.gating(hidden[:, 0], hidden[:, 1])


def _optional(weights: Mapping[str, Any], name: str) -> nnx.Param | None:
    return nnx.Param(weights[name]) if name in weights else None
