"""Inputs of attention with the mixture chain behind it, and what must come out, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attend_chain import AttentionOptions
from pallas_kernels.expert_mlp.choice import ChoiceProblem
from pallas_kernels.mixture_chain import MixtureWeights, mixture_state
from pallas_kernels.pages import KVPages
from tests.kernels.mixture_chain import conformance as mixture_chain
from tests.kernels.qkv_attention.raw import raw_product
from tests.kernels.ragged_attention.conformance import Case, Inputs, make as make_attention, oracle

OPTIONS: dict[str, Any] = {"eps": 1e-6, "activation": "silu"}


def make(
    case: Case,
    problem: ChoiceProblem,
    *,
    norms: bool = False,
    interleaved: bool = False,
    dtype: Any = jnp.bfloat16,
    **chain: Any,
) -> tuple[tuple[Any, Any, Any, Any, Any, Any], dict[str, Any], Inputs]:
    """The operation's arguments, its options, and attention's own inputs."""
    half = case.head_dim // 2
    raw, rotation, head_norms, inputs = raw_product(
        case, make_attention(case, dtype), half=half, norms=norms, interleaved=interleaved
    )
    inner, width = case.heads * case.head_dim, (case.heads + 2 * case.kv_heads) * case.head_dim
    chain = {"fused": width} | chain
    _, residual, weights = mixture_chain.make(problem, inner=inner, dtype=dtype, **chain)
    attention = AttentionOptions(case.head_dim**-0.5, rotation, head_norms, **inputs.options)
    state = mixture_state(residual.shape[1], problem.experts, inner)
    arguments = raw.reshape(1, -1), residual, weights, inputs.pages, inputs.rows, state
    return arguments, {**OPTIONS, "choice": problem, "attention": attention}, inputs


def wanted(
    case: Case,
    inputs: Inputs,
    residual: jax.Array,
    weights: MixtureWeights,
    problem: ChoiceProblem,
) -> tuple[np.ndarray, np.ndarray | None, KVPages]:
    """The residual stream, the next layer's first product, and the pages."""
    attended = oracle(case, inputs, case.head_dim**-0.5)
    attended = jnp.asarray(attended.reshape(1, -1), residual.dtype)
    stream, fused = mixture_chain.oracle(attended, residual, weights, problem, OPTIONS["eps"])
    pages = jax.jit(KVPages.write)(inputs.pages, inputs.k_new, inputs.v_new, inputs.rows)
    return stream, fused, pages


def assert_agrees(got: tuple[Any, ...], want: tuple[Any, ...], tolerance: float) -> None:
    """Both outputs by the norm of their error, and every slot of the pages."""
    for one, other in zip(got[:2], want[:2], strict=True):
        if other is None:
            assert one is None
        else:
            assert mixture_chain.difference(one, other) < tolerance
    for one, other in zip(*map(jax.tree.leaves, (got[2], want[2])), strict=True):
        one, other = (np.asarray(each).astype(np.float32) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=2e-2)  # NaN where it was
