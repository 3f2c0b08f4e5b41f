"""From a layer's raw QKV to the next one's as it is meant: attention, then the mixture chain."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp.choice import ChoiceProblem
from pallas_kernels.mixture_chain import reference as mixture_chain
from pallas_kernels.mixture_chain.checks import MixtureWeights
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.qkv_attention import portable as qkv_attention


def unsupported(problem: Any) -> str | None:  # noqa: ANN401
    """Serves everything."""
    del problem
    return None


def run(
    fused: Float[Array, "1 fused"],
    residual: Float[Array, "1 model"],
    weights: MixtureWeights,
    pages: KVPages,
    rows: RaggedRows,
    state: Int[Array, " state"],
    *,
    choice: ChoiceProblem,
    eps: float,
    activation: str,
    **options: Any,  # noqa: ANN401
) -> tuple[Array, Array | None, KVPages, Array]:
    """As attend_mixture."""
    raw = fused.reshape(fused.shape[0], pages.kv_heads, -1, pages.head_dim)
    attended, pages = qkv_attention.run(raw, pages, rows, alibi=None, **options)
    attended = attended.reshape(fused.shape[0], -1)
    stream, following, state = mixture_chain.run(
        attended, residual, weights, state, choice=choice, eps=eps, activation=activation
    )
    return stream, following, pages, state
