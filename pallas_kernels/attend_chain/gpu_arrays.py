"""What a kernel that begins with attention is given for it: its facts, its arrays, its limits."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.attend_chain.gpu_attend import HEAD, Attending
from pallas_kernels.attend_chain.gpu_places import BLOCK, places_of
from pallas_kernels.attend_chain.options import AttentionOptions
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.qkv_attention import gpu as qkv_attention
from pallas_kernels.qkv_attention.checks import QKVProblem
from pallas_kernels.ragged_attention.gpu_softmax import ROWS
from pallas_kernels.rope_write.gpu_turn import Turn, operands

_BLOCKS = 8  # of each multiprocessor at most, if the row were as long as its block table


def unsupported(problem: QKVProblem, context: int) -> str | None:
    """Why attention over up to so many tokens cannot begin a kernel; None if it can."""
    reason = qkv_attention.unsupported(problem)
    if reason is not None:
        return reason
    turn, sms = problem.turn, multiprocessors()
    if turn.tokens > 1:
        return "more than one token is as fast in kernels of their own"
    if turn.head_dim != HEAD:
        return f"heads of {turn.head_dim}; it has {HEAD}"
    if problem.attention.alibi:
        return "scores have a bias by distance"
    if turn.kv_heads > sms:
        return f"{turn.kv_heads} KV heads are more than {sms} multiprocessors"
    if context > longest_context(turn.kv_heads):
        return f"contexts of up to {context} take decode's own kernel"
    return None


def longest_context(kv_heads: int) -> int:
    """Tokens of the longest context that begins a kernel; of more, decode's own is faster."""
    return _BLOCKS * multiprocessors() // kv_heads * BLOCK


def attention_of(
    fused: Float[Array, "1 fused"],
    pages: KVPages,
    rows: RaggedRows,
    attention: AttentionOptions,
    *,
    blocks: int,
    interpret: bool,
) -> tuple[Attending, dict[str, Array]]:
    """The attention in a kernel of so many blocks of threads, and what it reads, by name."""
    kv_heads, sinks = pages.kv_heads, attention.sinks
    turning = attention.rotation, attention.norms
    raw = fused.reshape(1, kv_heads, -1, HEAD)
    one = Attending(
        kv_heads=kv_heads,
        group=raw.shape[2] - 2,
        page_size=pages.page_size,
        num_pages=pages.num_pages,
        scale=attention.scale,
        window=attention.window,
        soft_cap=attention.soft_cap,
        sinks=sinks is not None,
        turn=Turn.of(*turning, interpret),
        pieces=blocks // kv_heads,
    )
    places = places_of(
        rows,
        pieces=one.pieces,
        page_size=pages.page_size,
        num_pages=pages.num_pages,
        window=attention.window,
    )
    named = {"raw": raw, "places": places, "table": rows.block_table, **operands(*turning)}
    if sinks is not None:
        per_head = sinks.astype(jnp.float32).reshape(kv_heads, one.group)
        named["sinks"] = jnp.pad(per_head, ((0, 0), (0, ROWS - one.group)))
    return one, named


def written_by(one: Attending, pages: KVPages, dtype: Any, **others: Array) -> dict[str, Any]:
    """References to what it writes beside its outputs, by name: the pages, and the results of
    pieces; and to the others.
    """
    room = one.kv_heads * one.pieces * one.part_rows + ROWS
    arrays = {
        **others,
        "keys": pages.keys,
        "values": pages.values,
        "parts": lax.empty((2, room, HEAD), dtype),
        "weights": lax.empty((room,), jnp.float32),
    }
    return {name: jax.new_ref(array) for name, array in arrays.items()}


def pages_of(written: dict[str, Any]) -> KVPages:
    """The pages, when all is written."""
    return KVPages(keys=jax.freeze(written["keys"]), values=jax.freeze(written["values"]))


def apart(one: Attending) -> tuple[Attending, Attending]:
    """Its launches where no barrier is one of the whole grid: all pieces but the first, and that
    one, which joins them.
    """
    return replace(one, first=1), replace(one, after=1)
