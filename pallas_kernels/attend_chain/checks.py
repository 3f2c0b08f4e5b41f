"""The problem of attention with the chain behind it: that of both, and how long contexts may be."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.layer_chain.checks import ChainProblem, ChainWeights, check as check_chain
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.qkv_attention.checks import QKVProblem, check as check_attention
from pallas_kernels.rope_write.heads import HeadNorms, Rotation


@dataclass(frozen=True, slots=True)
class AttendProblem:
    """The static facts of one call. context: the most tokens that a row's block table holds."""

    chain: ChainProblem
    attention: QKVProblem
    context: int

    def __str__(self) -> str:
        return f"{self.attention}, contexts of up to {self.context}; {self.chain}"


def check(
    fused: Float[Array, "rows fused"],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    pages: KVPages,
    rows: RaggedRows,
    *,
    activation: str,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
) -> AttendProblem:
    """The problem, or ValueError naming the argument, what was expected and what came."""
    attention, attended = attention_problem(
        fused,
        pages,
        rows,
        rotation=rotation,
        norms=norms,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    return AttendProblem(
        chain=check_chain(attended, residual, weights, activation),
        attention=attention,
        context=rows.block_table.shape[1] * pages.page_size,
    )


def attention_problem(
    fused: Float[Array, "rows fused"],
    pages: KVPages,
    rows: RaggedRows,
    **options: Any,  # noqa: ANN401
) -> tuple[QKVProblem, Float[Array, "rows inner"]]:
    """The problem of attention alone, and an array of the shape that it gives; errors as above."""
    tokens, width = fused.shape
    whole = pages.kv_heads * pages.head_dim
    if width % whole:
        raise ValueError(
            f"fused must have heads of {pages.head_dim} for {pages.kv_heads} KV heads, "
            f"a multiple of {whole} columns, got {width}."
        )
    raw = fused.reshape(tokens, pages.kv_heads, -1, pages.head_dim)
    problem = check_attention(raw, pages, rows, alibi=None, **options)
    return problem, raw[:, :, 2:].reshape(tokens, -1)
