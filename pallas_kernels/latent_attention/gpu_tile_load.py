"""How blocks come to gpu_tiles: by tiles of channels, each as soon as its place is free."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.latent_attention.gpu_problem import WIDTH, Problem
from pallas_kernels.latent_attention.gpu_tile_memory import (
    KEY_TILE,
    ORDER,
    channels_of,
    free,
    full,
    tile_of,
)
from pallas_kernels.ragged_attention.gpu_l2 import bring_to_l2
from pallas_kernels.ragged_attention.gpu_schedule import BLOCK, ROW, Segment
from pallas_kernels.ragged_attention.gpu_softmax import ROWS


def page_of(problem: Problem, refs: SimpleNamespace, segment: Segment, i: Any) -> Any:
    """The page of a segment's block i, or of its last."""
    block = segment.block + jnp.minimum(i, segment.count - 1)
    return refs.table[refs.items[segment.item, ROW], block // (problem.page_size // BLOCK)]


def load_block(
    problem: Problem, refs: SimpleNamespace, place: int, segment: Segment, i: Any, page: Any
) -> None:
    """Load a segment's block i into its place, once the block that was there has been attended."""
    tokens = pl.ds(_within_page(problem, segment, i), BLOCK)
    for tile in ORDER:
        if tile != KEY_TILE:  # which this warpgroup itself was the last to read

            @pl.when(segment.done + i >= 2)
            def _reuse(tile: int = tile) -> None:
                plgpu.barrier_wait(free(refs, place, tile))

        plgpu.copy_gmem_to_smem(
            refs.latents.at[page, tokens, channels_of(tile)],
            tile_of(refs, place, tile),
            full(refs, place, tile),
        )


def bring_near(problem: Problem, refs: SimpleNamespace, segment: Segment, i: Any) -> None:
    """Ask the L2 for a segment's block i, if it has one; two sides ask for a half each."""
    if problem.interpret:
        return

    @pl.when(i < segment.count)
    def _ask() -> None:
        sides = min(max(problem.heads // ROWS, 1), 2)
        rows, page = BLOCK // sides, page_of(problem, refs, segment, i)
        first = _within_page(problem, segment, i) + lax.axis_index("side") % sides * rows
        size = rows * WIDTH * refs.latents.dtype.itemsize
        bring_to_l2(refs.latents.at[page, pl.ds(pl.multiple_of(first, 8), 8)], 2, size // 2)


def _within_page(problem: Problem, segment: Segment, i: Any) -> Any:
    """The first token of a segment's block i in its page."""
    block = (segment.block + i) % (problem.page_size // BLOCK)
    return pl.multiple_of(block * BLOCK, BLOCK)
