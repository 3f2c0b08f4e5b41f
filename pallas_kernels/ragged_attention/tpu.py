"""Ragged attention on TPUs with Mosaic, over pages whose rows are a key and its value."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.pages import KVPages, PackedRow, RaggedRows
from pallas_kernels.ragged_attention import tpu_rows
from pallas_kernels.ragged_attention.checks import AttentionProblem
from pallas_kernels.ragged_attention.tpu_attend import Options, Row, TPUPlan
from pallas_kernels.ragged_attention.tpu_write import write


def unsupported(problem: AttentionProblem) -> str | None:
    """Why the TPU kernel cannot serve this problem; None if it can."""
    if not problem.packed:
        return "the pages are laid out for another platform: allocate them for platform tpu"
    if problem.alibi_table:
        return "the bias of each position comes from a table"
    return tpu_rows.unsupported(
        tokens=problem.tokens,
        rows=problem.rows,
        blocks=problem.blocks,
        group=problem.group,
        kv_heads=problem.kv_heads,
        row=_row(problem.head_dim),
        page_size=problem.page_size,
        dtype=problem.dtype,
        page_dtype=problem.page_dtype,
    )


def _row(head: int) -> Row:
    packed = PackedRow.of(head)
    return Row.of(packed.lanes, key=head, value=packed.value, width=head)


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
    head, packed = pages.head_dim, pages.row
    row = _row(head)
    pool = write(packed.join(k_new, v_new), pages.keys, rows, interpret=interpret)
    out = tpu_rows.attend_rows(
        jnp.pad(q, ((0, 0), (0, 0), (0, row.key - head))),  # a value in these lanes counts nothing
        pool,
        row,
        rows,
        Options(scale, window, soft_cap, sinks, alibi),
        interpret=interpret,
        plan=plan,
    )
    first = packed.value - row.low
    return out[..., first : first + head], KVPages(keys=pool, values=pages.values)
