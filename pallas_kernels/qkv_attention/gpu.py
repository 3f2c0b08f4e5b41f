"""Attention on Hopper from the raw QKV product: one kernel turns and writes, the next attends.

One kernel for both was slower: each of its workers waited for its heads to be turned.
"""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.qkv_attention.checks import QKVProblem
from pallas_kernels.ragged_attention import gpu as ragged_attention
from pallas_kernels.rope_write import gpu as rope_write
from pallas_kernels.rope_write.heads import HeadNorms, Rotation


def unsupported(problem: QKVProblem) -> str | None:
    """Why the Hopper kernels cannot serve this problem; None if they can."""
    turning = rope_write.unsupported(problem.turn)
    return turning or ragged_attention.unsupported(problem.attention)


def run(
    qkv: Float[Array, "tokens kv_heads places head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    **options: Any,
) -> tuple[Float[Array, "tokens heads head"], KVPages]:
    """As qkv_attention."""
    q, pages = rope_write.run(qkv, pages, rows, rotation=rotation, norms=norms)
    return ragged_attention.attend(q, pages, rows, **options), pages
