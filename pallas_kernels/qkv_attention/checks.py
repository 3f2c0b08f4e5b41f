"""The problem of attention from the raw QKV product: that of its heads, and that of attention."""

from dataclasses import dataclass

from jaxtyping import Array, Float

from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.ragged_attention import checks as ragged_attention
from pallas_kernels.rope_write import checks as rope_write
from pallas_kernels.rope_write.heads import HeadNorms, Rotation


@dataclass(frozen=True, slots=True)
class QKVProblem:
    """The static facts of one call."""

    turn: rope_write.TurnProblem
    attention: ragged_attention.AttentionProblem

    def __str__(self) -> str:
        return f"{self.attention}; {self.turn}"


def check(
    qkv: Float[Array, "tokens kv_heads places head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, "heads ..."] | None,
) -> QKVProblem:
    """The problem, or ValueError naming the argument, what was expected and what came."""
    turn = rope_write.check(qkv, pages, rotation, norms)
    attention = ragged_attention.check_queries(
        (turn.tokens, turn.kv_heads * turn.group, turn.head_dim),
        qkv.dtype,
        pages,
        rows,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi=alibi,
    )
    return QKVProblem(turn=turn, attention=attention)
