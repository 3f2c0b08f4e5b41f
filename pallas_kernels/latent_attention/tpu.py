"""Latent attention on TPUs with Mosaic: ragged attention of one KV head whose key holds its value.

All heads of a token meet a latent in one product, and the latent is fetched once for both uses.
"""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.latent_attention.checks import LatentProblem
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import LANES, RaggedRows
from pallas_kernels.ragged_attention import tpu_rows
from pallas_kernels.ragged_attention.tpu_attend import Options, Row, TPUPlan
from pallas_kernels.ragged_attention.tpu_write import write


def unsupported(problem: LatentProblem) -> str | None:
    """Why the TPU kernel cannot serve this problem; None if it can."""
    if problem.width % LANES:
        return "the pages are laid out for another platform: allocate them for platform tpu"
    return tpu_rows.unsupported(
        tokens=problem.tokens,
        rows=problem.rows,
        blocks=problem.blocks,
        group=problem.heads,
        kv_heads=1,
        row=_row(problem.width, problem.latent),
        page_size=problem.page_size,
        dtype=problem.dtype,
        page_dtype=problem.page_dtype,
    )


def _row(width: int, latent: int) -> Row:
    return Row.of(width, key=width, value=0, width=latent)


def run(
    q: Float[Array, "tokens heads width"],
    new: Float[Array, "tokens width"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    latent: int,
    scale: float,
    interpret: Any = False,
    plan: TPUPlan | None = None,
) -> tuple[Float[Array, "tokens heads latent"], LatentPages]:
    """As latent_attention. interpret: parameters of Mosaic TPU's interpreter, for tests."""
    pool = write(new[:, None], pages.latents[:, None], rows, interpret=interpret)
    out = tpu_rows.attend_rows(
        q,
        pool,
        _row(pages.width, latent),
        rows,
        Options(scale),
        interpret=interpret,
        plan=plan,
    )
    return out[..., :latent], LatentPages(latents=pool[:, 0])
