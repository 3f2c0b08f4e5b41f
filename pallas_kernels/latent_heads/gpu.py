"""Queries and tokens for latent attention on Hopper, in one kernel.

A block of threads makes one part of one head, or of what all heads share, for up to 64 tokens. XLA
would need five kernels, and makes the product of a single token inside a concatenation, slowly.
"""

from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import wrong_device
from pallas_kernels.latent_heads import LatentHeadsProblem, LatentNorm
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows
from pallas_kernels.rope_write.heads import Rotation

_ROWS = 64
_PART = 128  # channels of a latent that a block of threads makes
_TILE = plgpu.Layout.WGMMA


def unsupported(problem: LatentHeadsProblem) -> str | None:
    """Why the kernel cannot serve this problem; None if it can."""
    wrong = wrong_device()
    if wrong is not None:
        return wrong
    if problem.dtype not in (jnp.bfloat16, jnp.float16) or problem.page_dtype != problem.dtype:
        return "products and pages must both be bfloat16 or both be float16"
    if (problem.plain, problem.rotated) != (128, 64) or problem.latent % _PART:
        return "heads must be 128 + 64 wide, and the latent a multiple of 128"
    if problem.page_width != problem.latent + problem.rotated:
        return "pages hold more than a latent and a key"
    if problem.tokens > _ROWS:
        return f"more than {_ROWS} tokens"
    return None


def run(
    queries: Float[Array, "tokens queries"],
    token: Float[Array, "tokens token"],
    up: Float[Array, "heads channels latent"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    plain: int,
    norm: LatentNorm,
    rotation: Rotation,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens heads width"], LatentPages]:
    """As latent_heads. interpret: parameters of Mosaic GPU's interpreter, for tests."""
    page, offset = rows.token_slots(
        queries.shape[0], page_size=pages.page_size, num_pages=pages.num_pages
    )
    args = queries, token, up, pages, page, offset, norm, rotation
    return _heads(*args, plain=plain, interpret=interpret)


# Jitted so that the layers of a model share one trace and, being equal, one compiled kernel.
@partial(jax.jit, static_argnames=("plain", "interpret"))
def _heads(
    queries: Float[Array, "tokens queries"],
    token: Float[Array, "tokens token"],
    up: Float[Array, "heads channels latent"],
    pages: LatentPages,
    page: Int[Array, " tokens"],
    offset: Int[Array, " tokens"],
    norm: LatentNorm,
    rotation: Rotation,
    *,
    plain: int,
    interpret: Any,
) -> tuple[Float[Array, "tokens heads width"], LatentPages]:
    tokens, heads, latent = queries.shape[0], up.shape[0], up.shape[2]
    rotated = 2 * rotation.cos.shape[1]
    cos, sin = _each_channel(rotation)
    out = jax.new_ref(lax.empty((tokens, heads, latent + rotated), queries.dtype))
    written = jax.new_ref(pages.latents)
    named = {
        "queries": queries,
        "token": token,
        "up": up,
        "weight": norm.weight,
        "cos": cos,
        "sin": sin,
        "swap": jnp.asarray(_swap(rotated, rotation.interleaved), queries.dtype),
        "page": page,
        "offset": offset,
        "out": out,
        "pages": written,
    }
    scratch = _scratch(plain, rotated, latent, queries.dtype)
    fixed = SimpleNamespace(
        heads=heads, plain=plain, rotated=rotated, latent=latent, rows=tokens, eps=norm.eps
    )

    def body(*refs: Any) -> None:
        _part(fixed, SimpleNamespace(**dict(zip([*named, *scratch], refs, strict=True))))

    plgpu.kernel(
        body,
        scratch_types=list(scratch.values()),
        grid=(heads + 1, latent // _PART + 1),
        grid_names=("head", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="latent_heads",
    )(*named.values())
    return jax.freeze(out), LatentPages(latents=jax.freeze(written))


def _scratch(plain: int, rotated: int, latent: int, dtype: Any) -> dict[str, Any]:
    return {
        "line": plgpu.SMEM((_ROWS, _PART), dtype),
        "narrow": plgpu.SMEM((_ROWS, rotated), dtype),
        "latents": plgpu.SMEM((latent // _PART, _ROWS, _PART), dtype),
        "plain": _swizzled((_ROWS, plain), dtype),
        "turning": _swizzled((_ROWS, rotated), dtype),
        "weights": _swizzled((plain, _PART), dtype),
        "swapping": _swizzled((rotated, rotated), dtype),
        "angles": plgpu.SMEM((2, _ROWS, rotated), jnp.float32),
        "head_ready": plgpu.Barrier(num_arrivals=2),
        "turn_ready": plgpu.Barrier(num_arrivals=4),
        "latent_ready": plgpu.Barrier(num_arrivals=latent // _PART),
    }


def _each_channel(rotation: Rotation) -> tuple[jax.Array, jax.Array]:
    """cos and sin for every channel, not for every pair of them."""
    if rotation.interleaved:
        return jnp.repeat(rotation.cos, 2, axis=1), jnp.repeat(rotation.sin, 2, axis=1)
    return jnp.tile(rotation.cos, (1, 2)), jnp.tile(rotation.sin, (1, 2))


def _swap(rotated: int, interleaved: bool) -> np.ndarray:
    """What gives each channel its partner, with the sign that the sine has there: x @ swap."""
    first = np.arange(0, rotated, 2) if interleaved else np.arange(rotated // 2)
    second = first + (1 if interleaved else rotated // 2)
    swap = np.zeros((rotated, rotated), np.float32)
    swap[second, first], swap[first, second] = -1, 1
    return swap


def _swizzled(shape: tuple[int, int], dtype: Any) -> Any:
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _part(fixed: Any, refs: Any) -> None:
    """One block of threads: a part of a head's latent query or what turns of it; or the same of
    the tokens, in place of a head behind the last.
    """
    head, part = lax.axis_index("head"), lax.axis_index("part")
    heads, parts = fixed.heads, fixed.latent // _PART
    mine = pl.ds(0, fixed.rows)
    across = pl.ds(pl.multiple_of(part * _PART, _PART), _PART)

    @pl.when((head < heads) & (part < parts))
    def _absorb() -> None:
        first = pl.multiple_of(head * (fixed.plain + fixed.rotated), 64)
        value = _absorbed(fixed, refs, refs.queries.at[mine, pl.ds(first, fixed.plain)], across)
        _to_queries(fixed, refs, refs.line, value, mine, across)

    @pl.when((head < heads) & (part == parts))
    def _turn_query() -> None:
        first = pl.multiple_of(head * (fixed.plain + fixed.rotated) + fixed.plain, 64)
        value = _turned(fixed, refs, refs.queries.at[mine, pl.ds(first, fixed.rotated)], mine)
        last = pl.ds(fixed.latent, fixed.rotated)
        _to_queries(fixed, refs, refs.narrow, value, mine, last)

    behind = refs.token.shape[1] - fixed.latent - fixed.rotated

    @pl.when((head == heads) & (part < parts))
    def _normalise() -> None:
        value = _normalised(fixed, refs, mine, behind)
        _to_pages(fixed, refs, refs.line, value, across)

    @pl.when((head == heads) & (part == parts))
    def _turn_key() -> None:
        last = pl.ds(behind + fixed.latent, fixed.rotated)
        value = _turned(fixed, refs, refs.token.at[mine, last], mine)
        _to_pages(fixed, refs, refs.narrow, value, pl.ds(fixed.latent, fixed.rotated))


def _absorbed(fixed: Any, refs: Any, source: Any, across: Any) -> jax.Array:
    """A head's plain channels times what would make its keys of the latents."""
    head = lax.axis_index("head")
    plgpu.copy_gmem_to_smem(source, refs.line.at[pl.ds(0, fixed.rows)], refs.head_ready)
    weights = refs.up.at[head, pl.ds(0, fixed.plain), across]
    plgpu.copy_gmem_to_smem(weights, refs.weights, refs.head_ready)
    plgpu.barrier_wait(refs.head_ready)
    refs.plain[...] = plgpu.load(refs.line, layout=_TILE, optimized=False)
    plgpu.commit_smem()
    return _product(refs.plain, refs.weights, _PART)


def _turned(fixed: Any, refs: Any, source: Any, mine: Any) -> jax.Array:
    """Rotated channels: each with its partner, found by a product with ones and minus ones."""
    some = pl.ds(0, fixed.rows)
    plgpu.copy_gmem_to_smem(source, refs.narrow.at[some], refs.turn_ready)
    plgpu.copy_gmem_to_smem(refs.cos.at[mine], refs.angles.at[0, some], refs.turn_ready)
    plgpu.copy_gmem_to_smem(refs.sin.at[mine], refs.angles.at[1, some], refs.turn_ready)
    plgpu.copy_gmem_to_smem(refs.swap, refs.swapping, refs.turn_ready)
    plgpu.barrier_wait(refs.turn_ready)
    raw = plgpu.load(refs.narrow, layout=_TILE, optimized=False)
    refs.turning[...] = raw
    plgpu.commit_smem()
    partner = _product(refs.turning, refs.swapping, fixed.rotated)
    cos, sin = (plgpu.load(refs.angles.at[i], layout=_TILE, optimized=False) for i in range(2))
    return raw.astype(jnp.float32) * cos + partner * sin


def _normalised(fixed: Any, refs: Any, mine: Any, behind: int) -> jax.Array:
    """This block's part of the latents, which needs all of them for their root mean square."""
    parts, part = fixed.latent // _PART, lax.axis_index("part")
    for i in range(parts):
        source = refs.token.at[mine, pl.ds(behind + i * _PART, _PART)]
        target = refs.latents.at[i, pl.ds(0, fixed.rows)]
        plgpu.copy_gmem_to_smem(source, target, refs.latent_ready)
    across = pl.ds(pl.multiple_of(part * _PART, _PART), _PART)
    weight = plgpu.load(refs.weight.at[across], layout=_TILE.reduce(0), optimized=False)
    plgpu.barrier_wait(refs.latent_ready)

    def load(i: Any) -> jax.Array:
        given = plgpu.load(refs.latents.at[i], layout=_TILE, optimized=False)
        return given.astype(jnp.float32)

    squares = reduce(jnp.add, ((value * value).sum(axis=1) for value in map(load, range(parts))))
    scale = lax.rsqrt(squares * (1 / fixed.latent) + fixed.eps)
    shape = (_ROWS, _PART)
    value = load(part) * lax.broadcast_in_dim(scale, shape, [0])
    rounded = value.astype(refs.token.dtype).astype(jnp.float32)  # as RMSNorm does
    return rounded * lax.broadcast_in_dim(weight.astype(jnp.float32), shape, [1])


def _product(left: Any, right: Any, columns: int) -> jax.Array:
    def products(total: Any) -> jax.Array:
        plgpu.wgmma(total, left, right)
        return total[...]

    return pl.run_scoped(products, plgpu.ACC((_ROWS, columns), jnp.float32))


def _to_queries(fixed: Any, refs: Any, line: Any, value: jax.Array, mine: Any, across: Any) -> None:
    line[...] = value.astype(line.dtype)
    plgpu.commit_smem()
    target = refs.out.at[mine, lax.axis_index("head"), across]
    plgpu.copy_smem_to_gmem(line.at[pl.ds(0, fixed.rows)], target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _to_pages(fixed: Any, refs: Any, line: Any, value: jax.Array, across: Any) -> None:
    line[...] = value.astype(line.dtype)
    plgpu.commit_smem()

    @pl.loop(0, fixed.rows)
    def _row(row: Any) -> None:
        page, offset = refs.page[row], refs.offset[row]

        @pl.when(page < refs.pages.shape[0])
        def _write() -> None:
            target = refs.pages.at[page, pl.ds(offset, 1), across]
            plgpu.copy_smem_to_gmem(line.at[pl.ds(row, 1)], target)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
