"""Ragged attention on Hopper GPUs with Mosaic GPU: which kernel serves a step."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.hopper import SMS, wrong_device
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.ragged_attention.checks import AttentionProblem
from pallas_kernels.ragged_attention.gpu_decode import DecodePlan, decode, decode_plan
from pallas_kernels.ragged_attention.gpu_prefill import PrefillPlan, prefill, prefill_plan
from pallas_kernels.ragged_attention.gpu_problem import Problem
from pallas_kernels.ragged_attention.gpu_schedule import BLOCK, Queries
from pallas_kernels.ragged_attention.gpu_softmax import ROWS

type Plan = PrefillPlan | DecodePlan

_MOST_TOKENS = 16  # of a row that decode attends together
_HEAD_DIMS = (64, 80, 96, 128, 192, 256)
_SHARED_MEMORY = 227 * 1024


def unsupported(problem: AttentionProblem) -> str | None:
    """Why the Hopper kernels cannot serve this problem; None if they can."""
    wrong = wrong_device()
    if wrong is not None:
        return wrong
    if problem.head_dim not in _HEAD_DIMS:
        return f"heads of {problem.head_dim}; the kernels have {', '.join(map(str, _HEAD_DIMS))}"
    if problem.dtype not in (jnp.bfloat16, jnp.float16) or problem.page_dtype != problem.dtype:
        return "queries and pages must both be bfloat16 or both be float16"
    if problem.page_size % BLOCK:
        return f"the page size must be a multiple of {BLOCK}"
    if problem.alibi_table:
        return "the bias of each position comes from a table"
    if problem.group > ROWS:
        return f"more than {ROWS} query heads share a KV head"
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
    interpret: Any = None,
    plans: tuple[Plan, ...] | None = None,
) -> tuple[Float[Array, "tokens heads head"], KVPages]:
    """As ragged_attention. interpret: parameters of Mosaic GPU's interpreter, for tests."""
    pages = pages.write(k_new, v_new, rows)
    out = attend(
        q,
        pages,
        rows,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi=alibi,
        interpret=interpret,
        plans=plans,
    )
    return out, pages


def attend(
    q: Float[Array, "tokens heads head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    alibi: Float[Array, " heads"] | None,
    interpret: Any = None,
    plans: tuple[Plan, ...] | None = None,
) -> Float[Array, "tokens heads head"]:
    """The attention alone, over pages that hold the new tokens already. plans: what runs, in this
    order; together they must serve every row.
    """
    tokens, heads, head_dim = q.shape
    problem = Problem(
        heads=heads,
        kv_heads=pages.kv_heads,
        head_dim=head_dim,
        page_size=pages.page_size,
        dtype=q.dtype,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks is not None,
        alibi=alibi is not None,
        window=window,
        interpret=interpret,
    )
    out = None
    for plan in _plans(problem, tokens, rows) if plans is None else plans:
        if isinstance(plan, PrefillPlan):
            out = prefill(q, pages, rows, problem, plan, sinks=sinks, alibi=alibi)
            continue
        queries = queries_of(rows, tokens) if plan.tokens == 1 else short_rows(rows, plan.tokens)
        one = problem._replace(tokens=plan.tokens)
        per_head = {"sinks": sinks, "alibi": alibi}
        out = decode(q, pages, rows.block_table, queries, one, plan, **per_head, out=out)
    assert out is not None, "no plan serves the queries"
    return out


def _plans(problem: Problem, tokens: int, rows: RaggedRows) -> tuple[Plan, ...]:
    """Decode where no row need have more than one token. Else rows of few tokens, decoding ones
    among them, go to decode too, which splits long contexts and reads each block once for all of a
    row's tokens; and longer ones to prefill.
    """
    count, machine = rows.starts.shape[0], (problem.head_dim, SMS, _SHARED_MEMORY)
    if tokens <= count:
        return (decode_plan(*machine),)
    most = min(_MOST_TOKENS, ROWS // problem.aligned_group)
    if most == 1:
        return (prefill_plan(*machine),)
    few = min(1 << (-(-tokens // count) - 1).bit_length(), most)
    return prefill_plan(*machine, longer_than=few), decode_plan(*machine, tokens=few)


def long_rows_plans(head_dim: int) -> tuple[Plan, ...]:
    """What serves steps of which no row has few query tokens."""
    return (prefill_plan(head_dim, SMS, _SHARED_MEMORY),)


def short_rows(rows: RaggedRows, most: int) -> Queries:
    """Every row of at most so many query tokens as one item."""
    lengths = rows.live_lengths()
    return Queries(
        token=rows.starts,
        row=jnp.arange(lengths.shape[0], dtype=jnp.int32),
        seen=jnp.where((lengths > 0) & (lengths <= most), rows.kv_lengths, 0),
        tokens=lengths,
    )


def queries_of(rows: RaggedRows, tokens: int) -> Queries:
    """Every token as a query of its own."""
    places = rows.token_places(tokens)
    return Queries(
        token=jnp.arange(tokens, dtype=jnp.int32),
        row=places.row,
        seen=jnp.where(places.valid, places.position + 1, 0),
    )
