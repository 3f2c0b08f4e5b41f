"""The routed experts of a layer, as far as they are this shard's.

No expert has a capacity: every token reaches every expert that it has chosen.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxgen_models.layers.collective import axes_dividing
from jaxgen_models.layers.gating import Gating
from jaxgen_models.layers.router import Chosen
from pallas_kernels.expert_mlp import SharedExpert, expert_mlp
from pallas_kernels.expert_mlp.choice import NOBODY


class Experts(nnx.Module):
    """This shard's experts, and its part of their hidden layers, or all of them.

    weights, placed on the mesh: experts_gate_up [experts, 2, ffn, model], experts_down
    [experts, model, ffn], and where the config has biases experts_gate_up_bias [experts, 2, ffn]
    and experts_down_bias [all experts, model].
    """

    def __init__(
        self, weights: Mapping[str, Any], gating: Gating, top_k: int | None = None
    ) -> None:
        self.gate_up = nnx.Param(weights["experts_gate_up"])
        self.down = nnx.Param(weights["experts_down"])
        self.gate_up_bias = _optional(weights, "experts_gate_up_bias")
        self.down_bias = _optional(weights, "experts_down_bias")
        self.axes = axes_dividing(weights["experts_gate_up"], 0)
        self.gating = gating
        self.top_k = top_k

    def partial(
        self,
        x: Float[Array, "tokens model"],
        chosen: Chosen,
        live: Bool[Array, " tokens"],
        shared: SharedExpert | None = None,
    ) -> Float[Array, "tokens model"]:
        """This shard's part of the sum over experts and over the hidden layer, without `bias`.

        Tokens that are not live go to no expert: padding reads no weights. shared is added as it
        is, so no two shards whose results are added up may be given the same part of it.
        """
        experts, spread = chosen.experts, jax.lax.axis_size(self.axes)
        if spread > 1:
            experts = experts - jax.lax.axis_index(self.axes) * self.gate_up.shape[0]
        if x.shape[0] > 1:  # no step is all padding
            experts = jnp.where(live[:, None], experts, NOBODY)
        return expert_mlp(
            x,
            experts,
            chosen.shares,
            self.gate_up[...],
            self.down[...],
            gate=self.gating,
            bias=None if self.gate_up_bias is None else self.gate_up_bias[...],
            shared=shared,
            top_k=self.top_k,
            spread=spread,
        )

    def bias(self, chosen: Chosen) -> Float[Array, "tokens model"] | None:
        """What the experts' output biases add, once over all shards."""
        if self.down_bias is None:
            return None
        each = self.down_bias[...][chosen.experts[:, : self.top_k]]
        shares = chosen.shares[:, : self.top_k, None]
        summed = (shares * each.astype(jnp.float32)).sum(axis=1)
        return summed.astype(each.dtype)


def _optional(weights: Mapping[str, Any], name: str) -> nnx.Param | None:
    return nnx.Param(weights[name]) if name in weights else None
