"""From one layer's raw QKV product to the next one's, for a few rows, as one operation.

Attention of one short row is a matter of waiting. Where it begins the kernel that goes on with the
layer's products, their weights stream meanwhile.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import layer_chain
from pallas_kernels.attend_chain.checks import AttendProblem, attention_has_kernel, check
from pallas_kernels.attend_chain.options import AttentionOptions
from pallas_kernels.dispatch import Operation, target_platform
from pallas_kernels.hopper import wrong_device
from pallas_kernels.layer_chain import ChainProblem, ChainWeights
from pallas_kernels.layer_chain.checks import check as check_chain
from pallas_kernels.pages import KVPages, RaggedRows

_OPERATION = Operation(
    name="attend_chain",
    modules={
        "reference": "pallas_kernels.attend_chain.reference",
        "gpu": "pallas_kernels.attend_chain.gpu",
    },
    kernels={"cuda": ("gpu",)},
    fallback="reference",
)


def attend_chain(
    fused: Float[Array, "rows fused"],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    pages: KVPages,
    rows: RaggedRows,
    state: Int[Array, "1"],
    *,
    attention: AttentionOptions,
    eps: float,
    activation: str,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows model"], Float[Array, "rows fused"] | None, KVPages, Int[Array, "1"]]:
    """layer_chain of what qkv_attention gives: the residual stream behind this layer, the next
    layer's fused QKV, the pages with the step's keys and values, and the state.

    fused: this layer's, as layer_chain gives it: for each KV head its queries, key and value.
    attention: its options. The other arguments are theirs, and so are the errors. What comes of
    padding tokens has no meaning.
    """
    problem = _problem(fused, residual, weights, pages, rows, attention, activation)
    return _OPERATION.choose(problem, implementation).run(
        *(fused, residual, weights, pages, rows, state),
        attention=attention,
        eps=eps,
        activation=activation,
    )


def has_kernel(
    fused: Float[Array, "rows fused"],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    pages: KVPages,
    rows: RaggedRows,
    *,
    attention: AttentionOptions,
    activation: str,
) -> bool:
    """Whether attend_chain would run a kernel, and none was asked for by name for its parts: where
    not, attention has one of its own, or none.
    """
    problem = _problem(fused, residual, weights, pages, rows, attention, activation)
    return (
        _OPERATION.has_kernel(problem)
        and attention_has_kernel(fused, pages, rows, attention)
        and layer_chain.has_kernel(residual, weights, activation)
    )


def _problem(
    fused: Float[Array, "rows fused"],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    pages: KVPages,
    rows: RaggedRows,
    attention: AttentionOptions,
    activation: str,
) -> AttendProblem[ChainProblem]:
    return check(
        *(fused, pages, rows, attention),
        lambda attended: check_chain(attended, residual, weights, activation),
    )


def longest_context(pages: KVPages) -> int | None:
    """The most tokens that one row's block table may hold for its attention to begin its layer's
    kernel, where the layer is a chain; None if such pages never do. pages: a layer's, or shapes.
    """
    if target_platform() != "cuda" or wrong_device() or pages.keys.dtype != jnp.bfloat16:
        return None
    # Imported here: Pallas's GPU side takes most of a second to import.
    from pallas_kernels.attend_chain import gpu_arrays

    if pages.head_dim != gpu_arrays.HEAD or pages.page_size % gpu_arrays.BLOCK:
        return None
    return gpu_arrays.longest_context(pages.kv_heads)


__all__ = ["AttendProblem", "AttentionOptions", "attend_chain", "has_kernel", "longest_context"]
