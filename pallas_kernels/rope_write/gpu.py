"""Heads turned and written on Hopper: one block of threads a token, from the raw product.

Keys and values go straight into their pages, queries to an array of their own.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import wrong_device
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.ragged_attention.gpu_softmax import ROWS, TILE
from pallas_kernels.rope_write.checks import TurnProblem
from pallas_kernels.rope_write.gpu_turn import Turn, operands, prepared, turned
from pallas_kernels.rope_write.heads import HeadNorms, Rotation

_HEAD_DIMS = (64, 80, 96, 128, 192, 256)


def unsupported(problem: TurnProblem) -> str | None:
    """Why the Hopper kernels cannot serve this problem; None if they can."""
    wrong = wrong_device()
    if wrong is not None:
        return wrong
    if problem.head_dim not in _HEAD_DIMS:
        return f"heads of {problem.head_dim}; the kernels have {', '.join(map(str, _HEAD_DIMS))}"
    if problem.dtype not in (jnp.bfloat16, jnp.float16) or problem.page_dtype != problem.dtype:
        return "the product and the pages must both be bfloat16 or both be float16"
    if problem.group + 2 > ROWS:
        return f"a group of {problem.group} with its key and value is more than {ROWS} rows"
    at_once = _heads_at_once(problem.kv_heads, problem.group + 2)
    if problem.head_dim == 256 and at_once % 4 and jax.__version_info__ >= (0, 12):
        # Rows of 512 bytes, swizzled fewer than four at a time, have bank conflicts, and newer
        # Mosaic looks for another layout for longer than anybody would wait.
        return f"heads of 256, {at_once} KV heads in a block: jax 0.12 finds no layout"
    least = 4 if problem.interleaved else 8
    if problem.half % least:
        return f"half of the turning channels, {problem.half}, is not a multiple of {least}"
    return None


def run(
    qkv: Float[Array, "tokens kv_heads places head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens heads head"], KVPages]:
    """As rope_write. interpret: parameters of Mosaic GPU's interpreter, for tests."""
    page, offset = rows.token_slots(
        qkv.shape[0], page_size=pages.page_size, num_pages=pages.num_pages
    )
    return _turn_and_write(qkv, pages, page, offset, rotation, norms, interpret)


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("interpret",))
def _turn_and_write(
    qkv: Float[Array, "tokens kv_heads places head"],
    pages: KVPages,
    page: Int[Array, " tokens"],
    offset: Int[Array, " tokens"],
    rotation: Rotation | None,
    norms: HeadNorms | None,
    interpret: Any,
) -> tuple[Float[Array, "tokens heads head"], KVPages]:
    tokens, kv_heads, places, head_dim = qkv.shape
    group = places - 2
    at_once = _heads_at_once(kv_heads, places)
    out, keys, values = (
        jax.new_ref(each)
        for each in (
            lax.empty((tokens, kv_heads, group, head_dim), qkv.dtype),
            pages.keys,
            pages.values,
        )
    )
    named = {
        "raw": qkv,
        "page": page,
        "offset": offset,
        **operands(rotation, norms),
        "out": out,
        "keys": keys,
        "values": values,
    }
    turn = Turn.of(rotation, norms, bool(interpret))

    def rope_write(*refs: Any) -> None:
        given = SimpleNamespace(**dict(zip([*named, "line", "ready"], refs, strict=True)))
        _one(turn, given, at_once, group, pages.num_pages)

    plgpu.kernel(
        rope_write,
        scratch_types=[
            plgpu.SMEM((ROWS, head_dim), qkv.dtype),
            plgpu.Barrier(num_arrivals=places),
        ],
        grid=(tokens, kv_heads // at_once),
        grid_names=("token", "heads"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(*named.values())
    written = KVPages(keys=jax.freeze(keys), values=jax.freeze(values))
    return jax.freeze(out).reshape(tokens, kv_heads * group, head_dim), written


def _heads_at_once(kv_heads: int, places: int) -> int:
    """KV heads of a block of threads: as many as fit a tile and divide them all."""
    return next(n for n in range(ROWS // places, 0, -1) if kv_heads % n == 0)


def _one(turn: Turn, refs: Any, heads: int, group: int, num_pages: int) -> None:
    """Some KV heads of one token: rows of the tile by place in the group, then by head."""
    token = lax.axis_index("token")
    mine = pl.ds(lax.axis_index("heads") * heads, heads)

    def rows(place: int) -> Any:
        return refs.line.at[pl.ds(place * heads, heads)]

    for place in range(group + 2):
        plgpu.copy_gmem_to_smem(refs.raw.at[token, mine, place], rows(place), refs.ready)
    page, offset = refs.page[token], refs.offset[token]
    found = prepared(turn, refs, token, refs.line.shape[1])
    plgpu.barrier_wait(refs.ready)
    raw = plgpu.load(refs.line, layout=TILE, optimized=False)
    refs.line[...] = turned(turn, raw, found, group, heads)
    plgpu.commit_smem()
    for place in range(group):
        plgpu.copy_smem_to_gmem(rows(place), refs.out.at[token, mine, place])

    @pl.when(page < num_pages)
    def _write() -> None:
        plgpu.copy_smem_to_gmem(rows(group), refs.keys.at[page, mine, offset])
        plgpu.copy_smem_to_gmem(rows(group + 1), refs.values.at[page, mine, offset])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
