"""From a layer's raw QKV to the next one's as it is meant: attention, then the mixture chain."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.attend_chain.options import AttentionOptions
from pallas_kernels.attend_chain.reference import attend
from pallas_kernels.mixture_chain import reference as mixture_chain
from pallas_kernels.mixture_chain.checks import MixtureWeights
from pallas_kernels.pages import KVPages, RaggedRows


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
    attention: AttentionOptions,
    **chain: Any,  # noqa: ANN401
) -> tuple[Array, Array | None, KVPages, Array]:
    """As attend_mixture."""
    attended, pages = attend(fused, pages, rows, attention)
    stream, following, state = mixture_chain.run(attended, residual, weights, state, **chain)
    return stream, following, pages, state
