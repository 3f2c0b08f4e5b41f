"""What every implementation of latent attention may rely on, or ValueError says what not."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows


@dataclass(frozen=True, slots=True)
class LatentProblem:
    """The static facts of one call, by which an implementation says whether it can serve."""

    tokens: int
    rows: int
    blocks: int
    heads: int
    latent: int
    width: int
    page_size: int
    dtype: np.dtype
    page_dtype: np.dtype

    def __str__(self) -> str:
        return (
            f"{self.heads} heads over a latent of {self.latent} of {self.width}, {self.tokens} "
            f"tokens in {self.rows} rows, pages of {self.page_size}, {self.dtype} with "
            f"{self.page_dtype} pages"
        )


def check(
    q: Float[Array, "tokens heads width"],
    new: Float[Array, "tokens width"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    latent: int,
) -> LatentProblem:
    """The problem, or ValueError naming the argument, what was expected and what came."""
    tokens, heads, width = q.shape
    if not pages.holds(width):
        raise ValueError(f"q has a width of {width}, the pages hold {pages.width} channels.")
    if new.shape != (tokens, width):
        raise ValueError(f"new must be {(tokens, width)} to fit q, got {new.shape}.")
    if not 1 <= latent <= width:
        raise ValueError(f"latent must lie between 1 and the width, {width}, got {latent}.")
    for leaf in jax.tree.leaves(rows):
        if leaf.dtype != jnp.int32:
            raise ValueError(f"the arrays of rows must be int32, got {leaf.dtype}.")
    return LatentProblem(
        tokens=tokens,
        rows=rows.starts.shape[0],
        blocks=rows.block_table.shape[1],
        heads=heads,
        latent=latent,
        width=pages.width,
        page_size=pages.page_size,
        dtype=jnp.dtype(q.dtype),
        page_dtype=jnp.dtype(pages.latents.dtype),
    )
