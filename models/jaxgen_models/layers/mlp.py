"""The gated feed-forward block (Shazeer, arXiv:2002.05202): down(act(gate(x)) * up(x))."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jaxgen_models.layers.activation import ACTIVATIONS
from jaxgen_models.layers.collective import sum_shards
from jaxgen_models.layers.linear import project, project_gated


class GatedMLP(nnx.Module):
    """Gate and up are one product; the ffn axis is this shard's part of it.

    weights: gate_up [2, ffn, model], down [model, ffn], and where the config has biases
      gate_up_bias
    [2, ffn], down_bias [model].
    """

    def __init__(self, weights: Mapping[str, Any], activation: str) -> None:
        self.gate_up = nnx.Param(weights["gate_up"])
        self.down = nnx.Param(weights["down"])
        self.gate_up_bias = _optional(weights, "gate_up_bias")
        self.down_bias = _optional(weights, "down_bias")
        self.activation = activation

    def __call__(self, x: Float[Array, "tokens model"]) -> Float[Array, "tokens model"]:
        out = sum_shards(self.partial(x))
        return out if self.down_bias is None else out + self.down_bias[...]

    def partial(self, x: Float[Array, "tokens model"]) -> Float[Array, "tokens model"]:
        """This shard's part of the sum, without the bias that is added to it."""
        weight = self.gate_up[...]
        if self.gate_up_bias is None:
            return project(project_gated(x, weight, self.activation), self.down[...])
        _, ffn, model = weight.shape
        hidden = project(x, weight.reshape(2 * ffn, model)).reshape(-1, 2, ffn)
        hidden = hidden + self.gate_up_bias[...]
        hidden = ACTIVATIONS[self.activation](hidden[:, 0]) * hidden[:, 1]
        return project(hidden, self.down[...])


def _optional(weights: Mapping[str, Any], name: str) -> nnx.Param | None:
    return nnx.Param(weights[name]) if name in weights else None
