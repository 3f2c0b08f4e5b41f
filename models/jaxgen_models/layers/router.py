"""Which experts a token goes to, and with which shares: one router for all families."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxgen_models.layers.linear import project_to_float32
from jaxgen_models.moe_config import RouterConfig
from pallas_kernels.expert_mlp.choice import ChoiceProblem, choose


class Chosen(NamedTuple):
    """The experts of each token and their shares, which need not add up to 1.

    There may be more columns than a token has experts: those hold NOBODY, with a share of 0.
    """

    experts: Int[Array, "tokens choices"]
    shares: Float[Array, "tokens choices"]


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
        experts, shares = choose(logits, self._choice_bias(), problem=self.problem(logits.shape[0]))
        return Chosen(experts, shares)

    def _choice_bias(self) -> Float[Array, " experts"] | None:
        return None if self.choice_bias is None else self.choice_bias[...]

    def problem(self, tokens: int) -> ChoiceProblem:
        """How so many tokens choose."""
        config = self.config
        return ChoiceProblem(
            tokens=tokens,
            experts=self.weight.shape[0],
            top_k=config.top_k,
            softmax=config.scoring == "softmax",
            groups=1 if config.top_groups == config.groups else config.groups,
            top_groups=1 if config.top_groups == config.groups else config.top_groups,
            group_best=1 if config.group_score == "max" else 2,
            normalise=config.normalise,
            scale=config.scale,
        )
