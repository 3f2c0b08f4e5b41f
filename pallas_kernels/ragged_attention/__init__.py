"""Ragged paged attention: any number of query tokens per sequence, each against its own pages."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Operation
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.ragged_attention.checks import AttentionProblem, check

_OPERATION = Operation(
    name="ragged_attention",
    modules={
        "reference": "pallas_kernels.ragged_attention.reference",
        "portable": "pallas_kernels.ragged_attention.portable",
        "gpu": "pallas_kernels.ragged_attention.gpu",
        "tpu": "pallas_kernels.ragged_attention.tpu",
    },
    kernels={"cuda": ("gpu",), "tpu": ("tpu",)},
    fallback="portable",
)


def ragged_attention(
    q: Float[Array, "tokens heads head"],
    k_new: Float[Array, "tokens kv_heads head"],
    v_new: Float[Array, "tokens kv_heads head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi: Float[Array, "heads ..."] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads head"], KVPages]:
    """Write the step's keys and values into the pages, then attend causally. One layer, one shard.

    The score of query position i and key position j <= i is q.k * scale, capped to
    soft_cap * tanh(score / soft_cap), plus alibi[head] * (j - i); or plus alibi[head, j], where a
    model rounds the bias of each key position, for all positions that the block table can hold.
    With a window W a query sees itself and the W - 1 tokens before. sinks[head] is a logit that
    joins the softmax and has no value. Query head h uses KV head h // (heads // kv_heads). Outputs
    of padding tokens are zeros, and padding touches no page. The pages are updated in place if the
    caller donates them.

    implementation: "reference", "portable" or a kernel's name; None chooses by platform. Raises
    ValueError for shapes that do not fit together, UnsupportedShape for a named implementation that
    cannot serve them.
    """
    problem = check(
        q, k_new, v_new, pages, rows, window=window, soft_cap=soft_cap, sinks=sinks, alibi=alibi
    )
    chosen = _OPERATION.choose(problem, implementation)
    return chosen.run(
        q,
        k_new,
        v_new,
        pages,
        rows,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi=alibi,
    )


__all__ = ["AttentionProblem", "ragged_attention"]
