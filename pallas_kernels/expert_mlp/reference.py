"""The meaning of the experts' blocks: every expert serves every token, shares pick."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp.checks import ExpertsProblem, Gate
from pallas_kernels.expert_mlp.shared import SharedExpert, visit


def unsupported(problem: ExpertsProblem) -> str | None:
    """The reference serves everything."""
    del problem
    return None


def run(
    x: Float[Array, "tokens model"],
    experts: Int[Array, "tokens top_k"],
    shares: Float[Array, "tokens top_k"],
    gate_up: Float[Array, "experts 2 ffn model"],
    down: Float[Array, "experts model ffn"],
    *,
    gate: Gate,
    bias: Float[Array, "experts 2 ffn"] | None,
    shared: SharedExpert | None = None,
    top_k: int | None = None,
    spread: int = 1,
) -> Float[Array, "tokens model"]:
    """As expert_mlp, in float32."""
    del spread  # there are no tiles
    experts, shares = experts[:, :top_k], shares[:, :top_k]
    chosen = experts[:, :, None] == jnp.arange(gate_up.shape[0])
    share = jnp.where(chosen, shares[:, :, None], 0).sum(axis=1)
    known = jnp.where(chosen.any(axis=(1, 2))[:, None], x, 0).astype(jnp.float32)

    def product(equation: str, *operands: Array) -> Array:
        wide = [each.astype(jnp.float32) for each in operands]
        return jnp.einsum(equation, *wide, precision=jax.lax.Precision.HIGHEST)

    hidden = product("tm,ehfm->tehf", known, gate_up)
    if bias is not None:
        hidden = hidden + bias.astype(jnp.float32)
    hidden = gate(hidden[:, :, 0], hidden[:, :, 1])
    out = product("te,tef,emf->tm", share, hidden, down)
    if shared is not None:
        wide = jax.tree.map(lambda each: each.astype(jnp.float32), shared)
        out = out + visit(x.astype(jnp.float32), wide, gate)
    return out.astype(x.dtype)
