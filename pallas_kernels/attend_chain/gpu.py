"""Attention and chain in one launch on Hopper GPUs: which problems it serves, and its arrays."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attend_chain.checks import AttendProblem
from pallas_kernels.attend_chain.gpu_attend import HEAD, LINE, Attending
from pallas_kernels.attend_chain.gpu_places import BLOCK, places_of
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.layer_chain import gpu as layer_chain
from pallas_kernels.layer_chain.checks import ChainWeights
from pallas_kernels.layer_chain.gpu_kernel import launch
from pallas_kernels.layer_chain.gpu_plan import PARTS, Plan, Problem, make_plan
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.qkv_attention import gpu as qkv_attention
from pallas_kernels.ragged_attention.gpu_softmax import ROWS
from pallas_kernels.rope_write.gpu_turn import Turn, operands
from pallas_kernels.rope_write.heads import HeadNorms, Rotation

_BLOCKS = 8  # of each multiprocessor at most, if the row were as long as its block table


def unsupported(problem: AttendProblem) -> str | None:
    """Why the Hopper kernel cannot serve this problem; None if it can."""
    chain, attention = problem.chain, problem.attention
    reason = layer_chain.unsupported(chain) or qkv_attention.unsupported(attention)
    if reason is not None:
        return reason
    turn, sms = attention.turn, multiprocessors()
    if turn.tokens > 1:
        return "more than one token is as fast in kernels of their own"
    if turn.head_dim != HEAD:
        return f"heads of {turn.head_dim}; it has {HEAD}"
    if any(each % (PARTS * HEAD) for each in (chain.inner, chain.model, chain.ffn)):
        return f"the widths of the products' inputs must be multiples of {PARTS * HEAD}"
    if attention.attention.alibi:
        return "scores have a bias by distance"
    if turn.kv_heads > sms:
        return f"{turn.kv_heads} KV heads are more than {sms} multiprocessors"
    if turn.kv_heads * -(-problem.context // BLOCK) > _BLOCKS * sms:
        return f"contexts of up to {problem.context} take decode's own kernel"
    return None


def run(
    fused: Float[Array, "rows fused"],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    pages: KVPages,
    rows: RaggedRows,
    state: Int[Array, "1"],
    *,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    eps: float,
    activation: str,
    interpret: Any = None,
    plan: Plan | None = None,
) -> tuple[Array, Array | None, KVPages, Array]:
    """As attend_chain. interpret: parameters of Mosaic GPU's interpreter, for tests."""
    kv_heads = pages.kv_heads
    raw = fused.reshape(1, kv_heads, -1, HEAD)
    group = raw.shape[2] - 2
    stages = layer_chain.stages_of(kv_heads * group * HEAD, residual.shape[1], weights)
    if plan is None:
        plan = make_plan(1, stages, multiprocessors(), reserved=LINE)
    attending = Attending(
        kv_heads=kv_heads,
        group=group,
        page_size=pages.page_size,
        num_pages=pages.num_pages,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks is not None,
        turn=Turn.of(rotation, norms, bool(interpret)),
        pieces=plan.blocks // kv_heads,
    )
    inputs = {
        "raw": raw,
        "places": places_of(
            rows,
            pieces=attending.pieces,
            page_size=pages.page_size,
            num_pages=pages.num_pages,
            window=window,
        ),
        "table": rows.block_table,
        **operands(rotation, norms),
    }
    if sinks is not None:
        per_head = sinks.astype(jnp.float32).reshape(kv_heads, group)
        inputs["sinks"] = jnp.pad(per_head, ((0, 0), (0, ROWS - group)))
    problem = Problem(1, stages, fused.dtype, eps, activation, interpret, attending)
    return _run(inputs, residual, weights, pages, state, problem=problem, plan=plan)


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("problem", "plan"))
def _run(
    inputs: dict[str, Array],
    residual: Float[Array, "rows model"],
    weights: ChainWeights,
    pages: KVPages,
    state: Int[Array, "1"],
    *,
    problem: Problem,
    plan: Plan,
) -> tuple[Array, Array | None, KVPages, Array]:
    one, first = problem.before, problem.stages[0]
    assert isinstance(one, Attending), "the attention is missing"
    room = one.kv_heads * one.pieces * one.part_rows + ROWS
    written = {
        "keys": pages.keys,
        "values": pages.values,
        "attended": lax.empty((problem.rows * PARTS, first.inner // PARTS), problem.dtype),
        "parts": lax.empty((2, room, HEAD), problem.dtype),
        "weights": lax.empty((room,), jnp.float32),
    }
    refs = {name: jax.new_ref(array) for name, array in written.items()}
    named = {**inputs, **layer_chain.operands_of(residual, weights, problem), **refs}
    results = layer_chain.results_of(problem)
    if problem.interpret:  # the interpreter has no barrier of the whole grid: stage by stage
        for some in (replace(one, first=1), replace(one, after=1)):
            launch(replace(problem, stages=(), before=some), plan, {**named, **results})
        for stage in problem.stages:
            alone = replace(problem, stages=(stage,), before=None)
            launch(alone, plan, {**named, **results})
        handed_on = state
    else:
        meeting = jax.new_ref(state)
        launch(problem, plan, {**named, **results, "state": meeting})
        handed_on = jax.freeze(meeting)
    stream, fused = layer_chain.frozen(problem, results)
    pages = KVPages(keys=jax.freeze(refs["keys"]), values=jax.freeze(refs["values"]))
    return stream, fused, pages, handed_on
