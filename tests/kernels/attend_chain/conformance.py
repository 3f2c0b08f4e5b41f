"""Inputs of attention with the chain behind it, and what must come out, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attend_chain import AttentionOptions
from pallas_kernels.layer_chain import ChainWeights
from pallas_kernels.pages import KVPages
from tests.kernels.layer_chain import conformance as layer_chain
from tests.kernels.qkv_attention.raw import raw_product
from tests.kernels.ragged_attention.conformance import Case, Inputs, make as make_attention, oracle

NORM: dict[str, Any] = {"eps": 1e-5, "activation": "silu"}


def make(
    case: Case,
    *,
    norms: bool = False,
    interleaved: bool = False,
    dtype: Any = jnp.bfloat16,
    **chain: Any,
) -> tuple[tuple[Any, Any, Any, Any, Any], dict[str, Any], Inputs]:
    """The operation's arguments without its state, its options, and attention's own inputs."""
    half = case.head_dim // 2
    raw, rotation, head_norms, inputs = raw_product(
        case, make_attention(case, dtype), half=half, norms=norms, interleaved=interleaved
    )
    tokens, inner = raw.shape[0], case.heads * case.head_dim
    width = (case.heads + 2 * case.kv_heads) * case.head_dim
    _, residual, weights = layer_chain.make(tokens, inner=inner, fused=width, dtype=dtype, **chain)
    attention = AttentionOptions(case.head_dim**-0.5, rotation, head_norms, **inputs.options)
    arguments = raw.reshape(tokens, -1), residual, weights, inputs.pages, inputs.rows
    return arguments, {**NORM, "attention": attention}, inputs


def wanted(
    case: Case, inputs: Inputs, residual: jax.Array, weights: ChainWeights
) -> tuple[np.ndarray, np.ndarray, KVPages]:
    """The residual stream, the next fused QKV, and the pages; NaN in padding tokens."""
    attended = oracle(case, inputs, case.head_dim**-0.5)
    attended = jnp.asarray(attended.reshape(attended.shape[0], -1), residual.dtype)
    stream, fused = layer_chain.oracle(attended, residual, weights, *NORM.values())
    assert fused is not None
    pages = jax.jit(KVPages.write)(inputs.pages, inputs.k_new, inputs.v_new, inputs.rows)
    return stream, fused, pages


def assert_agrees(
    case: Case, inputs: Inputs, got: tuple[Any, ...], want: tuple[Any, ...], tolerance: float
) -> None:
    """Live tokens' outputs by the norm of their error, and every slot of the pages."""
    live = np.asarray(inputs.rows.token_places(inputs.q.shape[0]).valid)
    for one, other in zip(got[:2], want[:2], strict=True):
        assert layer_chain.difference(one[live], other[live]) < tolerance
    for one, other in zip(*map(jax.tree.leaves, (got[2], want[2])), strict=True):
        one, other = (np.asarray(each).astype(np.float32) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=2e-2)  # NaN where it was
