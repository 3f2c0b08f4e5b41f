"""The mixture chain's meaning in plain JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp import Gate, SharedExpert, expert_mlp
from pallas_kernels.expert_mlp.choice import ChoiceProblem, choose
from pallas_kernels.mixture_chain.checks import Leaf, MixtureProblem, MixtureWeights

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


def unsupported(problem: MixtureProblem) -> str | None:
    """It serves everything."""
    del problem
    return None


def run(
    attended: Float[Array, "1 inner"],
    residual: Float[Array, "1 model"],
    weights: MixtureWeights,
    state: Int[Array, "2"],
    *,
    choice: ChoiceProblem,
    eps: float,
    activation: str,
) -> tuple[Float[Array, "1 model"], Float[Array, "1 fused"] | None, Int[Array, "2"]]:
    """As mixture_chain."""
    dtype = residual.dtype
    x = residual + _product(attended, weights.out).astype(dtype)
    normed = _norm(x, weights.mlp_norm, eps)
    logits = _product(normed, weights.router)
    experts, shares = choose(logits, None, problem=choice, implementation="portable")
    shared = None
    if weights.shared_gate_up is not None:
        shared = SharedExpert(weights.shared_gate_up, weights.shared_down)
    x = x + expert_mlp(
        normed,
        experts,
        shares,
        weights.gate_up,
        weights.down,
        gate=_gates(activation),
        shared=shared,
        implementation="reference",
    )
    if weights.following is None:
        return x, None, state
    fused = _product(_norm(x, weights.next_norm, eps), weights.following)
    return x, fused.astype(dtype), state


def _gates(activation: str) -> Gate:
    return lambda gate, up: _ACTIVATIONS[activation](gate) * up


def _norm(x: Float[Array, "1 model"], weight: Leaf, eps: float) -> Float[Array, "1 model"]:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def _product(x: Float[Array, "1 inner"], weight: Leaf) -> Float[Array, "1 outer"]:
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
