"""Between the batch and the matrix tile: queries come in and outputs go out as plain lines.

A line holds a worker's rows of a tile, token by token; the tile that the matrix unit reads is
swizzled, and its 8 rows at a time need not begin where a token does.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.ragged_attention.gpu_problem import Problem
from pallas_kernels.ragged_attention.gpu_softmax import LOG2E, PER_ROW, ROWS, Softmax, spread
from pallas_kernels.ragged_attention.gpu_tiles import Tile


def _boxes(problem: Problem) -> bool:
    """Whether lines are seen both as rows and as (token, head of the group) boxes.

    The interpreter cannot reshape a line, and layout inference of jax 0.12.0 does not come to an
    end over one: there, tokens are copied one by one.
    """
    return not problem.interpret and jax.__version_info__ < (0, 12)


def line_shape(problem: Problem) -> tuple[int, ...]:
    """Rows of one worker, as boxes if the kernel uses them."""
    per_token, head_dim = problem.aligned_group, problem.head_dim
    return (ROWS // per_token, per_token, head_dim) if _boxes(problem) else (ROWS, head_dim)


def flat(problem: Problem, line: Any) -> Any:
    """A line as plain rows."""
    return line.reshape(ROWS, problem.head_dim) if _boxes(problem) else line


def of_token(problem: Problem, line: Any, index: Any) -> Any:
    """The rows of one token in a line, without those that only pad the group."""
    if _boxes(problem):
        return line.at[index, pl.ds(0, problem.group)]
    return line.at[pl.ds(index * problem.aligned_group, problem.group)]


def whole(problem: Problem, tokens: int) -> bool:
    """Whether a worker's share of a tile is one box of q: no rows between its tokens' heads."""
    per_token = problem.aligned_group
    boxed = per_token == problem.group and ROWS // per_token <= tokens
    return boxed and _boxes(problem)


def load_queries(problem: Problem, refs: Any, worker: int, tile: Tile) -> None:
    """Query rows of a worker's share of the tile, in one copy or in one a token."""
    tokens, per_token, group = refs.q.shape[0], problem.aligned_group, problem.group
    per_worker, heads = ROWS // per_token, pl.ds(tile.head * group, group)
    start, line = tile.start + worker * per_worker, refs.lines.at[worker, 0]
    if whole(problem, tokens):
        share = refs.q.at[pl.ds(start, per_worker), heads]
        plgpu.copy_gmem_to_smem(share, line, refs.ready.at[worker])
        return

    @pl.loop(0, per_worker)
    def _token(index: Any) -> None:
        plgpu.copy_gmem_to_smem(
            refs.q.at[jnp.minimum(start + index, tokens - 1), heads],
            of_token(problem, line, index),
            refs.ready.at[worker],
        )


def copy_layout(problem: Problem) -> Any:
    """How registers hold a tile on its way between plain and swizzled shared memory."""
    size = problem.head_dim * 2
    swizzle = next(each for each in (128, 64, 32) if size % each == 0)
    return plgpu.Layout.SMEM_GMEM_COPY((ROWS, problem.head_dim), problem.dtype, swizzle)


def store(problem: Problem, lines: int, refs: Any, worker: Any, state: Softmax, tile: Tile) -> None:
    """Outputs of a worker's live tokens, in one copy or in one a token."""
    top, total, out = state.top, state.total, state.out
    if problem.sinks:
        sink = plgpu.load(refs.sinks.at[tile.head], layout=PER_ROW, optimized=False) * LOG2E
        top = jnp.maximum(state.top, sink)
        fade = jnp.exp2(state.top - top)
        total = total * fade + jnp.exp2(sink - top)
        out = out * spread(fade, problem.head_dim)
    out = out * spread(1.0 / total, problem.head_dim)
    # Through the query tile, whose swizzle spares the bank conflicts of writing plain rows.
    queries, line = refs.queries.at[worker], refs.lines.at[worker, lines - 1]
    queries[...] = out.astype(problem.dtype)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the stores of the tile before
    rows = flat(problem, line)
    rows[...] = plgpu.load(queries, layout=copy_layout(problem))
    plgpu.commit_smem()
    per_worker = ROWS // problem.aligned_group
    heads = pl.ds(tile.head * problem.group, problem.group)
    start = tile.start + worker * per_worker
    count = jnp.clip(tile.count - worker * per_worker, 0, per_worker)
    boxed = whole(problem, refs.q.shape[0])
    if boxed:

        @pl.when(count == per_worker)
        def _at_once() -> None:
            plgpu.copy_smem_to_gmem(line, refs.out.at[pl.ds(start, per_worker), heads])

    @pl.loop(0, jnp.where(count == per_worker, 0, count) if boxed else count)
    def _token(index: Any) -> None:
        plgpu.copy_smem_to_gmem(of_token(problem, line, index), refs.out.at[start + index, heads])

    if lines == 1:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(refs.read.at[worker])


def per_row(per_head: Float[Array, " heads"], problem: Problem) -> Float[Array, "kv_heads rows"]:
    """A value of each query head for the rows of its KV head's tiles."""
    per_token = problem.aligned_group
    grouped = per_head.astype(jnp.float32).reshape(problem.kv_heads, problem.group)
    grouped = jnp.pad(grouped, ((0, 0), (0, per_token - problem.group)))
    return jnp.tile(grouped, (1, ROWS // per_token))
