"""The choice of experts in plain JAX, which is also its meaning."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp.choice import ChoiceProblem


def unsupported(problem: ChoiceProblem) -> str | None:
    """The portable implementation serves everything."""
    del problem
    return None


def run(
    logits: Float[Array, "tokens experts"],
    choice_bias: Float[Array, " experts"] | None,
    *,
    problem: ChoiceProblem,
) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
    """As choose."""
    scores = jax.nn.softmax(logits, axis=-1) if problem.softmax else jax.nn.sigmoid(logits)
    wanted = scores
    if choice_bias is not None:
        wanted = wanted + choice_bias.astype(jnp.float32)
    _, experts = jax.lax.top_k(_within_groups(wanted, problem), problem.top_k)
    shares = jnp.take_along_axis(scores, experts, axis=-1)
    if problem.normalise:
        # The smallest addend that keeps scores which are all zero from dividing by it.
        shares = shares / (shares.sum(axis=-1, keepdims=True) + 1e-20)
    return experts.astype(jnp.int32), shares * problem.scale


def _within_groups(
    scores: Float[Array, "tokens experts"], problem: ChoiceProblem
) -> Float[Array, "tokens experts"]:
    """Scores of experts outside the best groups become -inf."""
    if problem.top_groups == problem.groups:
        return scores
    tokens, experts = scores.shape
    grouped = scores.reshape(tokens, problem.groups, experts // problem.groups)
    best, _ = jax.lax.top_k(grouped, problem.group_best)
    _, chosen = jax.lax.top_k(best.sum(axis=-1), problem.top_groups)
    allowed = (chosen[:, :, None] == jnp.arange(problem.groups)).any(axis=1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)
