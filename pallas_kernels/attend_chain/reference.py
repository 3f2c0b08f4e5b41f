"""From a layer's raw QKV to the next one's as it is meant: attention, then the chain."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.attend_chain.checks import raw_heads
from pallas_kernels.attend_chain.options import AttentionOptions
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
    attention: AttentionOptions,
    **chain: Any,  # noqa: ANN401
) -> tuple[Array, Array | None, KVPages, Array]:
    """As attend_chain."""
    attended, pages = attend(fused, pages, rows, attention)
    stream, following, state = layer_chain.run(attended, residual, weights, state, **chain)
    return stream, following, pages, state


def attend(
    fused: Float[Array, "rows fused"],
    pages: KVPages,
    rows: RaggedRows,
    attention: AttentionOptions,
) -> tuple[Float[Array, "rows inner"], KVPages]:
    """What each row gathers, and the pages with the new keys and values."""
    raw = raw_heads(fused, pages)
    attended, pages = qkv_attention.run(raw, pages, rows, alibi=None, **attention.by_name())
    return attended.reshape(fused.shape[0], -1), pages
