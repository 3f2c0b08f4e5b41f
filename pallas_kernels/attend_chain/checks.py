"""The problem of attention with a chain behind it: that of both, and how long contexts may be."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Array, Float

from pallas_kernels import qkv_attention
from pallas_kernels.attend_chain.options import AttentionOptions
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.qkv_attention.checks import QKVProblem, check as check_attention


@dataclass(frozen=True, slots=True)
class AttendProblem[Chain]:
    """The static facts of one call. chain: those of the chain that attention begins. context: the
    most tokens that a row's block table holds.
    """

    chain: Chain
    attention: QKVProblem
    context: int

    def __str__(self) -> str:
        return f"{self.attention}, contexts of up to {self.context}; {self.chain}"


def check[Chain](
    fused: Float[Array, "rows fused"],
    pages: KVPages,
    rows: RaggedRows,
    attention: AttentionOptions,
    chain_of: Callable[[Float[Array, "rows inner"]], Chain],
) -> AttendProblem[Chain]:
    """The problem, or ValueError naming the argument, what was expected and what came.

    chain_of: the chain's problem, of an array of the shape that attention gives.
    """
    tokens, width = fused.shape
    whole = pages.kv_heads * pages.head_dim
    if width % whole:
        raise ValueError(
            f"fused must have heads of {pages.head_dim} for {pages.kv_heads} KV heads, "
            f"a multiple of {whole} columns, got {width}."
        )
    raw = raw_heads(fused, pages)
    problem = check_attention(raw, pages, rows, alibi=None, **attention.of_problem())
    return AttendProblem(
        chain=chain_of(raw[:, :, 2:].reshape(tokens, -1)),
        attention=problem,
        context=rows.block_table.shape[1] * pages.page_size,
    )


def attention_has_kernel(
    fused: Float[Array, "rows fused"],
    pages: KVPages,
    rows: RaggedRows,
    attention: AttentionOptions,
) -> bool:
    """Whether qkv_attention would run a kernel."""
    raw = raw_heads(fused, pages)
    return qkv_attention.has_kernel(raw, pages, rows, **attention.of_problem())


def raw_heads(
    fused: Float[Array, "rows fused"], pages: KVPages
) -> Float[Array, "rows kv_heads places head"]:
    """As qkv_attention takes them."""
    return fused.reshape(fused.shape[0], pages.kv_heads, -1, pages.head_dim)
