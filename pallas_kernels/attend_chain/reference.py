"""From a layer's raw QKV to the next one's as it is meant: attention, then the chain."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.layer_chain import reference as layer_chain
from pallas_kernels.layer_chain.checks import ChainWeights
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.qkv_attention import portable as qkv_attention


def unsupported(problem: Any) -> str | None:  # noqa: ANN401
    """Serves everything."""
    del problem
    return None


def run(
    fused: Float[Array, "rows fused"],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    pages: KVPages,
    rows: RaggedRows,
    state: Int[Array, "1"],
    *,
    eps: float,
    activation: str,
    **options: Any,  # noqa: ANN401
) -> tuple[Array, Array | None, KVPages, Array]:
    """As attend_chain."""
    tokens = fused.shape[0]
    raw = fused.reshape(tokens, pages.kv_heads, -1, pages.head_dim)
    attended, pages = qkv_attention.run(raw, pages, rows, alibi=None, **options)
    stream, following, state = layer_chain.run(
        attended.reshape(tokens, -1), residual, weights, state, eps=eps, activation=activation
    )
    return stream, following, pages, state
