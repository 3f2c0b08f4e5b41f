"""The feed-forward block without a gate: down(act(up(x)))."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jaxgen_models.layers.activation import ACTIVATIONS
from jaxgen_models.layers.collective import sum_shards
from jaxgen_models.layers.linear import project


class PlainMLP(nnx.Module):
    """Two products; the ffn axis is this shard's part of it.

    weights: up [ffn, model], down [model, ffn], and where the config has biases up_bias [ffn] and
    down_bias [model].
    """

    def __init__(self, weights: Mapping[str, Any], activation: str) -> None:
        self.up = nnx.Param(weights["up"])
        self.down = nnx.Param(weights["down"])
        self.up_bias = nnx.Param(weights["up_bias"]) if "up_bias" in weights else None
        self.down_bias = nnx.Param(weights["down_bias"]) if "down_bias" in weights else None
        self.activation = activation

    def __call__(self, x: Float[Array, "tokens model"]) -> Float[Array, "tokens model"]:
        hidden = project(x, self.up[...])
        if self.up_bias is not None:
            hidden = hidden + self.up_bias[...]
        # Padded ffn channels have zero weights on both sides, whatever the activation gives at 0.
        hidden = ACTIVATIONS[self.activation](hidden)
        out = sum_shards(project(hidden, self.down[...]))
        return out if self.down_bias is None else out + self.down_bias[...]
