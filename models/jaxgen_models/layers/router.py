"""Which experts a token goes to, and with which shares: one router for all families."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxgen_models.layers.linear import project_to_float32
from jaxgen_models.moe_config import RouterConfig


class Chosen(NamedTuple):
    """The experts of each token and their shares, which need not add up to 1."""

    experts: Int[Array, "tokens top_k"]
    shares: Float[Array, "tokens top_k"]


class Router(nnx.Module):
    """Scores of all experts, the best top_k of them; everything in float32, the same on all shards.

    weights: router [experts, model], and where the family has them router_bias [experts], which is
    added to the logits, and choice_bias [experts], which is added to the scores that decide on the
    experts, but not to their shares.
    """

    def __init__(self, weights: Mapping[str, Any], config: RouterConfig) -> None:
        self.weight = nnx.Param(weights["router"])
        self.bias = nnx.Param(weights["router_bias"]) if "router_bias" in weights else None
        self.choice_bias = nnx.Param(weights["choice_bias"]) if "choice_bias" in weights else None
        self.config = config

    def __call__(self, x: Float[Array, "tokens model"]) -> Chosen:
        logits = project_to_float32(x, self.weight[...])
        if self.bias is not None:
            logits = logits + self.bias[...].astype(jnp.float32)
        softmax = self.config.scoring == "softmax"
        scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
        wanted = scores
        if self.choice_bias is not None:
            wanted = wanted + self.choice_bias[...].astype(jnp.float32)
        _, experts = jax.lax.top_k(self._within_groups(wanted), self.config.top_k)
        shares = jnp.take_along_axis(scores, experts, axis=-1)
        if self.config.normalise:
            # The smallest addend that keeps scores which are all zero from dividing by it.
            shares = shares / (shares.sum(axis=-1, keepdims=True) + 1e-20)
        return Chosen(experts.astype(jnp.int32), shares * self.config.scale)

    def _within_groups(
        self, scores: Float[Array, "tokens experts"]
    ) -> Float[Array, "tokens experts"]:
        """Scores of experts outside the best groups become -inf."""
        config = self.config
        if config.top_groups == config.groups:
            return scores
        tokens, experts = scores.shape
        grouped = scores.reshape(tokens, config.groups, experts // config.groups)
        best, _ = jax.lax.top_k(grouped, 1 if config.group_score == "max" else 2)
        _, chosen = jax.lax.top_k(best.sum(axis=-1), config.top_groups)
        allowed = (chosen[:, :, None] == jnp.arange(config.groups)).any(axis=1)
        return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)
