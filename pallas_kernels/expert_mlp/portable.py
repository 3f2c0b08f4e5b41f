"""The experts' blocks in plain JAX: tokens sorted by expert, two grouped products, and back."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp.checks import ExpertsProblem, Gate
from pallas_kernels.expert_mlp.shared import SharedExpert, visit
from pallas_kernels.grouped_matmul import grouped_matmul


def unsupported(problem: ExpertsProblem) -> str | None:
    """The portable implementation serves everything."""
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
    """As expert_mlp; the hidden layers are rounded to x's dtype before and after the gate."""
    del spread  # there are no tiles
    local, _, ffn, model = gate_up.shape
    experts, shares = experts[:, :top_k], shares[:, :top_k]
    tokens, top_k = experts.shape
    mine = (experts >= 0) & (experts < local)
    expert = jnp.where(mine, experts, local).reshape(-1)
    order = jnp.argsort(expert)
    sizes = (expert[:, None] == jnp.arange(local)).sum(axis=0, dtype=jnp.int32)
    rows = x[order // top_k]
    hidden = grouped_matmul(rows, gate_up.reshape(local, 2 * ffn, model), sizes)
    hidden = hidden.reshape(-1, 2, ffn)
    if bias is not None:
        hidden = hidden + bias.at[expert[order]].get(mode="clip")
    out = grouped_matmul(gate(hidden[:, 0], hidden[:, 1]), down, sizes)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    out = out[place].reshape(tokens, top_k, model)
    shares = jnp.where(mine, shares, 0)
    out = (shares[:, :, None] * out.astype(jnp.float32)).sum(axis=1).astype(x.dtype)
    return out if shared is None else out + visit(x, shared, gate)
