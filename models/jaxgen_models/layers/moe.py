"""A mixture of experts (Shazeer et al., arXiv:1701.06538), with an expert for all where there is
one (DeepSeekMoE, arXiv:2401.06066).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxgen_models.layers.collective import EXPERT_AXIS, sum_experts, sum_shards
from jaxgen_models.layers.experts import Experts
from jaxgen_models.layers.gating import ActivatedGate, Gating
from jaxgen_models.layers.linear import project_to_float32
from jaxgen_models.layers.mlp import GatedMLP
from jaxgen_models.layers.router import Router
from jaxgen_models.moe_config import RouterConfig
from pallas_kernels.dispatch import target_platform
from pallas_kernels.expert_mlp import SharedExpert


class MoE(nnx.Module):
    """Shares of the chosen experts' outputs, plus the shared expert's, which may be gated.

    weights: what Router and Experts take, and where the family has them shared_gate_up
    [2, ffn, model], shared_down [model, ffn], shared_gate [1, model].
    """

    def __init__(
        self, weights: Mapping[str, Any], router: RouterConfig, gating: Gating, activation: str
    ) -> None:
        self.router = Router(weights, router)
        self.experts = Experts(weights, gating, router.top_k)
        self.shared = _shared(weights, activation) if "shared_gate_up" in weights else None
        self.shared_gate = nnx.Param(weights["shared_gate"]) if "shared_gate" in weights else None
        self.activation = activation
        self.alike = gating == ActivatedGate(activation)

    def __call__(
        self, x: Float[Array, "tokens model"], live: Bool[Array, " tokens"]
    ) -> Float[Array, "tokens model"]:
        """live: which tokens are not padding."""
        chosen = self.router(x)
        if self.shared is None:
            out = sum_experts(self.experts.partial(x, chosen, live))
        elif self._in_one():
            weights = (self.shared.gate_up[...], self.shared.down[...])
            out = self.experts.partial(x, chosen, live, SharedExpert(*weights, self._gate(x)))
        else:
            out = sum_experts(self.experts.partial(x, chosen, live))
            shared, gate = self.shared.partial(x), self._gate(x)
            if gate is not None:
                shared = (shared.astype(jnp.float32) * gate[:, None]).astype(x.dtype)
            out = out + shared
        out = sum_shards(out)
        bias = self.experts.bias(chosen)
        return out if bias is None else out + bias

    @property
    def is_plain(self) -> bool:
        """Whether there are neither biases nor a gate of the shared expert, and one activation."""
        experts, router = self.experts, self.router
        biases = experts.gate_up_bias, experts.down_bias, router.bias, router.choice_bias
        return self.alike and self.shared_gate is None and all(each is None for each in biases)

    def _in_one(self) -> bool:
        """Whether a kernel can serve the shared expert as one of many.

        Over the tensor axis each shard has its own part of it, wherever the experts lie.
        """
        alone = jax.lax.axis_size(EXPERT_AXIS) == 1
        return alone and self.alike and target_platform() == "cuda"

    def _gate(self, x: Float[Array, "tokens model"]) -> Float[Array, " tokens"] | None:
        """What the shared expert's output is multiplied by, where it is."""
        if self.shared_gate is None:
            return None
        return jax.nn.sigmoid(project_to_float32(x, self.shared_gate[...]))[:, 0]


def _shared(weights: Mapping[str, Any], activation: str) -> GatedMLP:
    parts = {"gate_up": weights["shared_gate_up"], "down": weights["shared_down"]}
    return GatedMLP(parts, activation)
