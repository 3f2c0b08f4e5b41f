"""Attention on Hopper from the raw QKV product: one kernel for a decode step, else two."""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.qkv_attention.checks import QKVProblem
from pallas_kernels.ragged_attention import gpu as ragged_attention
from pallas_kernels.ragged_attention.gpu import attend, plan_for, queries_of
from pallas_kernels.ragged_attention.gpu_decode import DecodePlan, decode
from pallas_kernels.ragged_attention.gpu_prefill import PrefillPlan
from pallas_kernels.ragged_attention.gpu_problem import Problem
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
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, " heads"] | None,
    interpret: Any = None,
    plan: DecodePlan | PrefillPlan | None = None,
) -> tuple[Float[Array, "tokens heads head"], KVPages]:
    """As qkv_attention. interpret: parameters of Mosaic GPU's interpreter, for tests."""
    tokens, kv_heads, places, head_dim = qkv.shape
    plan = plan or plan_for(tokens, rows, head_dim)
    per_head = {"sinks": sinks, "alibi": alibi}
    if isinstance(plan, PrefillPlan):
        q, pages = rope_write.run(
            qkv, pages, rows, rotation=rotation, norms=norms, interpret=interpret
        )
        how = {"scale": scale, "window": window, "soft_cap": soft_cap}
        return attend(q, pages, rows, **how, **per_head, interpret=interpret, plan=plan), pages
    problem = Problem(
        heads=kv_heads * (places - 2),
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=pages.page_size,
        dtype=qkv.dtype,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks is not None,
        alibi=alibi is not None,
        window=window,
        interpret=interpret,
        raw=True,
    )
    queries = queries_of(rows, tokens)
    return decode(
        qkv,
        pages,
        rows.block_table,
        queries,
        problem,
        plan,
        **per_head,
        rotation=rotation,
        norms=norms,
    )
