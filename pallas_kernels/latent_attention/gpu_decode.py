"""Latent decode on Hopper for up to 32 heads: bound by reading, so tokens fill the matrix rows.

A block of 64 tokens is the left operand of both products, the heads are the few columns of the
right one: nothing is padded to the matrix unit's 64 rows. The batch's blocks are one line, cut
evenly over the SMs; rows cut across SMs are put together by a second small kernel.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.latent_attention.gpu_combine import combine_heads
from pallas_kernels.latent_attention.gpu_problem import LATENT, NEVER, WIDTH, Problem
from pallas_kernels.latent_attention.gpu_runs import even_runs
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.ragged_attention.gpu_schedule import (
    BLOCK,
    BLOCKS,
    COUNT,
    ROW,
    SEEN,
    TOKEN,
    Queries,
    Segment,
    walk,
)
from pallas_kernels.ragged_attention.gpu_softmax import (
    LOG2E,
    MASKED,
    TILE,
    clear_rows_from,
    swizzled,
)

MOST_HEADS = 32  # whose outputs one warpgroup holds in registers
_PART = 192  # channels of a block that are loaded at a time
_PARTS = WIDTH // _PART
_VALUES = tuple(min(_PART, LATENT - part * _PART) for part in range(_PARTS))  # of each part
_PER_HEAD = TILE.reduce(0)
_TURNED = plgpu.Layout.WGMMA_TRANSPOSED


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """workers: blocks of threads; slots: parts of KV blocks in flight in each."""

    workers: int
    slots: int


def decode_plan(heads: int, sms: int, shared_memory: int) -> DecodePlan:
    """As many slots as shared memory holds beside the queries and the weights."""
    heads = -(-heads // 8) * 8
    room = shared_memory - 4096 - heads * (WIDTH + BLOCK) * 2
    return DecodePlan(workers=sms, slots=min(room // (BLOCK * _PART * 2), 9))


class _Softmax(NamedTuple):
    """Online softmax, turned: weighted values [channels, heads] of each part, largest score
    [heads], sums of weights [tokens of a block, heads].
    """

    out: tuple[jax.Array, ...]
    top: jax.Array
    total: jax.Array


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("problem", "plan"))
def decode(
    q: Float[Array, "tokens heads width"],
    pages: LatentPages,
    table: Int[Array, "rows blocks"],
    queries: Queries,
    problem: Problem,
    plan: DecodePlan,
) -> Float[Array, "tokens heads latent"]:
    """Attention of single query tokens over their pages; one item for every token of q."""
    tokens, heads, _ = q.shape
    schedules = even_runs(queries, plan.workers)
    out = jax.new_ref(lax.empty((tokens, heads, LATENT), q.dtype))
    parts = jax.new_ref(lax.empty((2 * plan.workers, LATENT, heads), q.dtype))
    weights = jax.new_ref(lax.empty((2 * plan.workers, heads), jnp.float32))
    named = {
        "q": q,
        "latents": pages.latents,
        "table": table,
        "items": schedules.items,
        "work": schedules.work,
        "out": out,
        "parts": parts,
        "weights": weights,
    }

    def latent_decode(*refs: Any) -> None:
        given = dict(zip(named, refs, strict=False))
        scratch = ("lines", "shares", "tops", "ring", "full", "free", "ready")
        given.update(zip(scratch, refs[len(named) :], strict=True))
        common = (problem, plan, SimpleNamespace(**given), lax.axis_index("sm"))
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(lambda: _attend(*common))
        pl.when(warpgroup == 1)(lambda: _stream(*common))

    plgpu.kernel(
        latent_decode,
        scratch_types=[
            plgpu.RefUnion(  # of one segment: first its queries, at last its outputs
                swizzled(heads, WIDTH, problem.dtype, (1,)),
                swizzled(heads, LATENT, problem.dtype),
                plgpu.SMEM((LATENT, heads), problem.dtype),
            ),
            swizzled(heads, BLOCK, problem.dtype),
            plgpu.SMEM((heads,), jnp.float32),
            swizzled(BLOCK, _PART, problem.dtype, (plan.slots,)),
            plgpu.Barrier(num_barriers=plan.slots),
            plgpu.Barrier(num_barriers=plan.slots),
            plgpu.Barrier(),
        ],
        grid=(plan.workers,),
        grid_names=("sm",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=problem.interpret,
    )(*named.values())
    combine_heads(problem, out, schedules, parts, weights)
    return jax.freeze(out)


def _stream(problem: Problem, plan: DecodePlan, refs: Any, worker: Any) -> None:
    """The loading warpgroup: the parts of every block of the run, in order, as slots come free."""
    slots, per_page = plan.slots, problem.page_size // BLOCK

    def load(segment: Segment) -> None:
        row = refs.items[segment.item, ROW]

        @pl.loop(0, segment.count)
        def _block(i: Any) -> None:
            block = segment.block + i
            page = refs.table[row, block // per_page]
            tokens = pl.ds(pl.multiple_of(block % per_page * BLOCK, BLOCK), BLOCK)
            for part in range(_PARTS):
                use = _PARTS * (segment.done + i) + part
                slot = lax.rem(use, jnp.int32(slots))

                @pl.when(use >= slots)
                def _reuse(slot: Any = slot) -> None:
                    plgpu.barrier_wait(refs.free.at[slot])

                plgpu.copy_gmem_to_smem(
                    refs.latents.at[page, tokens, pl.ds(part * _PART, _PART)],
                    refs.ring.at[slot],
                    refs.full.at[slot],
                )

    walk(refs.items, refs.work, worker, 1, load)
    uses = _PARTS * refs.work[worker, COUNT]

    @pl.loop(jnp.maximum(uses - slots, 0), uses)  # every release must be seen before the end
    def _drain(use: Any) -> None:
        plgpu.barrier_wait(refs.free.at[lax.rem(use, jnp.int32(slots))])


def _across(per_head: jax.Array, rows: int) -> jax.Array:
    """The same value in all rows of a head's column."""
    return lax.broadcast_in_dim(per_head, (rows, per_head.shape[0]), [1])


def _fresh(heads: int) -> _Softmax:
    """Nothing seen yet."""

    def full(rows: int) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((rows, heads), jnp.float32), TILE)

    top = plgpu.layout_cast(jnp.full((heads,), MASKED, jnp.float32), _PER_HEAD)
    return _Softmax(out=tuple(full(rows) for rows in _VALUES), top=top, total=full(BLOCK))


def _attend(problem: Problem, plan: DecodePlan, refs: Any, worker: Any) -> None:
    """The computing warpgroup."""
    heads = problem.heads
    queries = refs.lines[0]

    def slots_of(segment: Segment, i: Any) -> list[Any]:
        first = _PARTS * (segment.done + i)
        return [lax.rem(first + part, jnp.int32(plan.slots)) for part in range(_PARTS)]

    def compute(segment: Segment) -> None:
        token, seen = refs.items[segment.item, TOKEN], refs.items[segment.item, SEEN]
        plgpu.copy_gmem_to_smem(refs.q.at[token], queries.at[0], refs.ready)
        plgpu.barrier_wait(refs.ready)

        def block(i: Any, state: _Softmax) -> _Softmax:
            slots = slots_of(segment, i)
            left = seen - (segment.block + i) * BLOCK

            def product(accumulator: Any) -> jax.Array:
                for part, slot in enumerate(slots):
                    plgpu.barrier_wait(refs.full.at[slot])
                    channels = queries.at[i >> NEVER, :, pl.ds(part * _PART, _PART)]
                    plgpu.wgmma(accumulator, refs.ring.at[slot], channels.transpose((1, 0)))
                return accumulator[...]

            raw = pl.run_scoped(product, plgpu.ACC((BLOCK, heads), jnp.float32))
            at = plgpu.broadcasted_iota(jnp.int32, (BLOCK, heads), 0, layout=TILE)
            value = jnp.where(at < left, raw * (problem.scale * LOG2E), MASKED)
            top = jnp.maximum(state.top, value.max(axis=0))
            fade = jnp.exp2(state.top - top)
            shares = jnp.exp2(value - _across(top, BLOCK))
            turned = refs.shares.transpose((1, 0))
            turned[...] = plgpu.layout_cast(shares.astype(problem.dtype), _TURNED)
            plgpu.commit_smem()
            faded = tuple(out * _across(fade, out.shape[0]) for out in state.out)
            values = [
                refs.ring.at[slot, :, pl.ds(0, n)] for slot, n in zip(slots, _VALUES, strict=True)
            ]

            @pl.when(left < BLOCK)
            def _clear() -> None:
                for each, channels in zip(values, _VALUES, strict=True):
                    for first in range(0, channels, BLOCK):
                        clear_rows_from(each.at[:, pl.ds(first, BLOCK)], left, BLOCK, BLOCK)

            out = _accumulate(faded, values, turned, bool(problem.interpret))
            for slot in slots:
                plgpu.barrier_arrive(refs.free.at[slot])
            return _Softmax(out, top, state.total * _across(fade, BLOCK) + shares)

        state = lax.fori_loop(0, segment.count, block, _fresh(heads))
        _store(refs, worker, segment, token, state)

    walk(refs.items, refs.work, worker, 1, compute)


def _accumulate(
    outs: tuple[jax.Array, ...], values: list[Any], shares: Any, interpret: bool
) -> tuple[jax.Array, ...]:
    """Each out [channels, heads] + its values [tokens, channels] turned times shares [tokens,
    heads], both in shared memory.
    """
    if interpret:  # the interpreter cannot give an accumulator its first value
        loaded = [shares[...], *(each[...] for each in values)]
        plgpu.commit_smem()
        return tuple(
            out + jnp.dot(each.T, loaded[0], preferred_element_type=jnp.float32)
            for out, each in zip(outs, loaded[1:], strict=True)
        )

    def product(accumulators: Any) -> None:
        for accumulator, each in zip(accumulators, values, strict=True):
            plgpu.wgmma(accumulator, each.transpose((1, 0)), shares)

    return pl.run_state(product)(tuple(plgpu.ACC.init(out) for out in outs))


def _store(refs: Any, worker: Any, segment: Segment, token: Any, state: _Softmax) -> None:
    """A whole row's outputs, or a part of them with its weight."""
    _, outputs, staged = refs.lines
    total = state.total.sum(axis=0)
    outs = [out / _across(total, out.shape[0]) for out in state.out]
    began, ends = segment.block == 0, segment.block + segment.count
    whole = began & (ends == refs.items[segment.item, BLOCKS])

    @pl.when(whole)
    def _row() -> None:
        for part, out in enumerate(outs):
            mine = outputs.at[:, pl.ds(part * _PART, out.shape[0])].transpose((1, 0))
            mine[...] = plgpu.layout_cast(out.astype(outputs.dtype), _TURNED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(outputs, refs.out.at[token])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(~whole)
    def _part() -> None:
        index = 2 * worker + began.astype(jnp.int32)
        refs.tops[...] = state.top + jnp.log(total) * LOG2E
        for part, out in enumerate(outs):
            mine = staged.at[pl.ds(part * _PART, out.shape[0])]
            mine[...] = out.astype(staged.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.tops, refs.weights.at[index])
        plgpu.copy_smem_to_gmem(staged, refs.parts.at[index])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
