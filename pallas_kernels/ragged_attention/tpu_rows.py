"""What TPU kernels of attention share: from a step's rows to items, and back to its tokens.

Decode steps are one item a token. Mixed steps run twice: rows of a single token first, then the
longer spans in blocks, so that neither pads the other.
"""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.pages import RaggedRows
from pallas_kernels.ragged_attention import tpu_chip
from pallas_kernels.ragged_attention.tpu_attend import (
    Options,
    Row,
    TPUPlan,
    attend_items,
    plan_for,
    vmem,
)
from pallas_kernels.ragged_attention.tpu_items import (
    Items,
    blocks_of_tokens,
    each_token,
    gather_queries,
    most_spans,
    scatter_outputs,
    single_tokens,
)
from pallas_kernels.ragged_attention.tpu_write import most_slabs, slab_rows

_ITEM_NUMBERS, _SLAB_NUMBERS = 3, 5
"""Of each item and slab, in scalar memory: what Items and the write's slabs are made of."""


def unsupported(
    *,
    tokens: int,
    rows: int,
    blocks: int,
    group: int,
    kv_heads: int,
    row: Row,
    page_size: int,
    dtype: DTypeLike,
    page_dtype: DTypeLike,
) -> str | None:
    """Why no TPU kernel can serve steps of this shape; None if it can."""
    if dtype not in (jnp.bfloat16, jnp.float32) or page_dtype != dtype:
        return "queries and pages must both be bfloat16 or both be float32"
    slab = slab_rows(page_dtype)
    if page_size % slab:
        return f"the page size must be a multiple of {slab}"
    sizes = (group, kv_heads, row, page_size, jnp.dtype(page_dtype).itemsize)
    plan = plan_for(
        group=group, kv_heads=kv_heads, row=row, page_size=page_size, itemsize=sizes[-1]
    )
    needed = vmem(plan, *sizes)
    if needed > tpu_chip.planned():
        return (
            f"one query token of all heads and one page need {needed} bytes of vector memory, "
            f"there are {tpu_chip.planned()}: lower block_size or raise tensor_parallel_size"
        )
    return tpu_chip.table_too_large(rows, blocks) or tpu_chip.lists_too_large(
        tokens,
        max(
            _ITEM_NUMBERS * most_spans(tokens, rows, _block(plan, tokens, rows)),
            _SLAB_NUMBERS * most_slabs(tokens, rows, slab),
        ),
    )


def _block(plan: TPUPlan, tokens: int, rows: int) -> int:
    """Tokens of an item; items are padded to whole blocks, so that with many rows less is wasted
    by small ones.
    """
    return min(plan.block, max(8, 4 * tokens // rows))


def attend_rows(
    q: Float[Array, "tokens heads key"],
    pool: Float[Array, "pages kv_heads page lanes"],
    row: Row,
    rows: RaggedRows,
    options: Options,
    *,
    interpret: Any = False,
    plan: TPUPlan | None = None,
) -> Float[Array, "tokens heads mixed"]:
    """Causal attention over pages that hold the new tokens already; zeros for padding tokens.

    row: what the lanes of the pool's rows are. interpret: parameters of Mosaic TPU's interpreter.
    """
    tokens, heads, _ = q.shape
    count, kv_heads = rows.starts.shape[0], pool.shape[1]
    if plan is None:
        plan = plan_for(
            group=heads // kv_heads,
            kv_heads=kv_heads,
            row=row,
            page_size=pool.shape[2],
            itemsize=pool.dtype.itemsize,
        )
        plan = TPUPlan(_block(plan, tokens, count), plan.pages)

    def attend(items: Items, block: int) -> Float[Array, "items kv_heads queries mixed"]:
        queries = gather_queries(q, items, block, kv_heads)
        fetched = TPUPlan(block, plan.pages)
        return attend_items(
            queries, pool, row, rows.block_table, items, fetched, options, interpret=interpret
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
    return jnp.where(valid[:, None, None], out, 0)
