"""From one layer's raw QKV product to the next one's for one row, through a mixture of experts.

As attend_chain does for dense layers: attention begins the kernel that goes on with the layer's
products, whose first weight streams meanwhile.
"""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels import mixture_chain, qkv_attention
from pallas_kernels.attend_mixture.checks import AttendMixtureProblem, check, check_state
from pallas_kernels.dispatch import Operation
from pallas_kernels.expert_mlp.choice import ChoiceProblem
from pallas_kernels.mixture_chain import MixtureWeights
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.rope_write.heads import HeadNorms, Rotation

_OPERATION = Operation(
    name="attend_mixture",
    modules={
        "reference": "pallas_kernels.attend_mixture.reference",
        "gpu": "pallas_kernels.attend_mixture.gpu",
    },
    kernels={"cuda": ("gpu",)},
    fallback="reference",
)


def attend_mixture(
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
    scale: float,
    rotation: Rotation | None = None,
    norms: HeadNorms | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "1 model"], Float[Array, "1 following"] | None, KVPages, Int[Array, " state"]
]:
    """mixture_chain of what qkv_attention gives: the residual stream behind this layer, the next
    layer's first product, the pages with the step's key and value, and the state.

    fused: this layer's first product: for each KV head its queries, key and value. state: as
    mixture_chain's, with `inner` numbers for what attention gathers. The other arguments are
    theirs, and so are the errors. What comes of a padding token has no meaning.
    """
    options = {
        "rotation": rotation,
        "norms": norms,
        "window": window,
        "soft_cap": soft_cap,
        "sinks": sinks,
    }
    arrays = fused, residual, weights, pages, rows
    problem = check(*arrays, choice=choice, activation=activation, **options)
    check_state(problem, state)
    chosen = _OPERATION.choose(problem, implementation)
    return chosen.run(
        *arrays,
        state,
        choice=choice,
        eps=eps,
        activation=activation,
        scale=scale,
        **options,
    )


def has_kernel(
    fused: Float[Array, "1 fused"],
    residual: Float[Array, "1 model"],
    weights: MixtureWeights,
    pages: KVPages,
    rows: RaggedRows,
    *,
    choice: ChoiceProblem,
    activation: str,
    rotation: Rotation | None = None,
    norms: HeadNorms | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> bool:
    """Whether attend_mixture would run a kernel, and none was asked for by name for its parts:
    where not, attention has one of its own, or none.
    """
    options: dict[str, Any] = {
        "rotation": rotation,
        "norms": norms,
        "window": window,
        "soft_cap": soft_cap,
        "sinks": sinks,
    }
    arrays = fused, residual, weights, pages, rows
    problem = check(*arrays, choice=choice, activation=activation, **options)
    raw = fused.reshape(fused.shape[0], pages.kv_heads, -1, pages.head_dim)
    return (
        _OPERATION.has_kernel(problem)
        and qkv_attention.has_kernel(raw, pages, rows, **options)
        and mixture_chain.has_kernel(residual, weights, choice, activation)
    )


__all__ = ["AttendMixtureProblem", "attend_mixture", "has_kernel"]
