"""What every implementation may rely on: shapes and dtypes agree, or ValueError says what not."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.pages import KVPages, RaggedRows


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """The static facts of one call, by which an implementation says whether it can serve.

    packed: whether the pages have TPU's layout.
    """

    tokens: int
    rows: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: np.dtype
    page_dtype: np.dtype
    window: int | None
    soft_cap: float | None
    sinks: bool
    alibi: bool
    alibi_table: bool = False
    packed: bool = False

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    def __str__(self) -> str:
        extras = [
            f"window {self.window}" if self.window is not None else "",
            f"soft cap {self.soft_cap}" if self.soft_cap is not None else "",
            "sinks" if self.sinks else "",
            "ALiBi" if self.alibi and not self.alibi_table else "",
            "ALiBi by a table of positions" if self.alibi_table else "",
        ]
        return ", ".join(
            [
                f"{self.heads}/{self.kv_heads} heads of {self.head_dim}",
                f"{self.tokens} tokens in {self.rows} rows",
                f"pages of {self.page_size}",
                f"{self.dtype} with {self.page_dtype} pages",
                *filter(None, extras),
            ]
        )


def check(
    q: Float[Array, "tokens heads head"],
    k_new: Float[Array, "tokens kv_heads head"],
    v_new: Float[Array, "tokens kv_heads head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, "heads ..."] | None,
) -> AttentionProblem:
    """The problem, or ValueError naming the argument, what was expected and what came."""
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        expected = (q.shape[0], pages.kv_heads, pages.head_dim)
        if new.shape != expected:
            raise ValueError(f"{name} must be {expected} to fit q and the pages, got {new.shape}.")
    return check_queries(
        q.shape, q.dtype, pages, rows, window=window, soft_cap=soft_cap, sinks=sinks, alibi=alibi
    )


def check_queries(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    pages: KVPages,
    rows: RaggedRows,
    *,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, "heads ..."] | None,
) -> AttentionProblem:
    """The same for queries of which only the shape, [tokens, heads, head], and dtype are there."""
    tokens, heads, head_dim = shape
    kv_heads = pages.kv_heads
    if head_dim != pages.head_dim:
        raise ValueError(f"q has heads of {head_dim}, the pages hold heads of {pages.head_dim}.")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly.")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}; None means no window.")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}; None means no cap.")
    by_table = alibi is not None and alibi.ndim == 2
    if alibi is not None and by_table:
        _check_table(alibi, heads, rows.block_table.shape[1] * pages.page_size)
    for name, per_head in (("sinks", sinks), ("alibi", None if by_table else alibi)):
        if per_head is not None and per_head.shape != (heads,):
            raise ValueError(f"{name} must be ({heads},), one a query head, got {per_head.shape}.")
    _check_rows(rows)
    return AttentionProblem(
        tokens=tokens,
        rows=rows.starts.shape[0],
        blocks=rows.block_table.shape[1],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=pages.page_size,
        dtype=jnp.dtype(dtype),
        page_dtype=jnp.dtype(pages.keys.dtype),
        window=window,
        soft_cap=soft_cap,
        sinks=sinks is not None,
        alibi=alibi is not None,
        alibi_table=by_table,
        packed=pages.packed,
    )


def _check_table(alibi: Float[Array, "heads positions"], heads: int, positions: int) -> None:
    if alibi.shape[0] != heads or alibi.shape[1] < positions:
        raise ValueError(
            f"alibi as a table must be ({heads}, {positions}), one a query head and one a position "
            f"of the block table at least, got {alibi.shape}."
        )


def _check_rows(rows: RaggedRows) -> None:
    count = rows.starts.shape[0]
    for name in ("starts", "query_lengths", "kv_lengths"):
        if getattr(rows, name).shape != (count,):
            got = getattr(rows, name).shape
            raise ValueError(f"rows.{name} must be ({count},) like rows.starts, got {got}.")
    if rows.block_table.ndim != 2 or rows.block_table.shape[0] != count:
        raise ValueError(
            f"rows.block_table must be ({count}, blocks), got {rows.block_table.shape}."
        )
    for leaf in jax.tree.leaves(rows):
        if leaf.dtype != jnp.int32:
            raise ValueError(f"the arrays of rows must be int32, got {leaf.dtype}.")
