"""Ragged attention on TPUs with Mosaic: which items there are, and what the kernel needs for them.

Decode steps are one item a token. Mixed steps run twice: rows of a single token first, then the
longer spans in blocks, so that neither pads the other.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.ragged_attention.checks import AttentionProblem
from pallas_kernels.ragged_attention.tpu_attend import TPUPlan, attend_items, plan_for
from pallas_kernels.ragged_attention.tpu_items import (
    Items,
    blocks_of_tokens,
    each_token,
    gather_queries,
    scatter_outputs,
    single_tokens,
)
from pallas_kernels.ragged_attention.tpu_write import slab_rows, write

_TABLE_BYTES = 512 * 1024
"""Of scalar memory for the block table; the smallest chip has a megabyte."""


def unsupported(problem: AttentionProblem) -> str | None:
    """Why the TPU kernel cannot serve this problem; None if it can."""
    if problem.dtype not in (jnp.bfloat16, jnp.float32) or problem.page_dtype != problem.dtype:
        return "queries and pages must both be bfloat16 or both be float32"
    if problem.head_dim % 128:
        return "heads must be a multiple of 128 wide: XLA would copy the pages to another layout"
    rows = slab_rows(problem.page_dtype)
    if problem.page_size % rows:
        return f"the page size must be a multiple of {rows}"
    if problem.alibi_table:
        return "the bias of each position comes from a table"
    if problem.rows * problem.blocks * 4 > _TABLE_BYTES:
        return (
            f"a block table of {problem.rows} rows and {problem.blocks} blocks exceeds the "
            f"{_TABLE_BYTES} bytes of scalar memory it may take: lower max_num_seqs or "
            "max_model_len, or raise block_size"
        )
    return None


def run(
    q: Float[Array, "tokens heads head"],
    k_new: Float[Array, "tokens kv_heads head"],
    v_new: Float[Array, "tokens kv_heads head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, " heads"] | None,
    interpret: Any = False,
    plan: TPUPlan | None = None,
) -> tuple[Float[Array, "tokens heads head"], KVPages]:
    """As ragged_attention. interpret: parameters of Mosaic TPU's interpreter, for tests."""
    tokens, heads, _ = q.shape
    count = rows.starts.shape[0]
    pages = write(k_new, v_new, pages, rows, interpret=interpret)
    if plan is None:
        plan = plan_for(
            group=heads // pages.kv_heads,
            kv_heads=pages.kv_heads,
            head=pages.head_dim,
            page_size=pages.page_size,
            itemsize=pages.keys.dtype.itemsize,
        )
        # Items are padded to whole blocks: with many rows, small blocks waste less.
        plan = TPUPlan(min(plan.block, max(8, 4 * tokens // count)), plan.pages)

    def attend(items: Items, block: int) -> Float[Array, "items kv_heads queries head"]:
        return attend_items(
            gather_queries(q, items, block, pages.kv_heads),
            pages,
            rows.block_table,
            items,
            TPUPlan(block, plan.pages),
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi=alibi,
            interpret=interpret,
        )

    if tokens <= count:
        items, place = each_token(rows, tokens)
        out = scatter_outputs(attend(items, 1), place, 1)
    else:
        singles, single_place, alone = single_tokens(rows, tokens)
        spans, span_place = blocks_of_tokens(rows, tokens, plan.block)
        out = jnp.where(
            alone[:, None, None],
            scatter_outputs(attend(singles, 1), single_place, 1),
            scatter_outputs(attend(spans, plan.block), span_place, plan.block),
        )
    valid = rows.token_places(tokens).valid
    return jnp.where(valid[:, None, None], out, 0).astype(q.dtype), pages
