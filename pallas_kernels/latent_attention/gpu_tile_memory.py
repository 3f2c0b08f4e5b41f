"""What the warpgroups of gpu_tiles share: two blocks, by tiles of channels, and what they hand on.

Block b of a worker's run lies in place b % 2.
"""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.latent_attention.gpu_problem import LATENT, WIDTH, Problem
from pallas_kernels.ragged_attention.gpu_schedule import BLOCK, BLOCKS, TOKEN, Segment
from pallas_kernels.ragged_attention.gpu_softmax import ROWS, swizzled

HALF = LATENT // 2  # channels of one attending warpgroup
# Channels of a tile, that is loaded and freed at a time. With 64 there are twice the barriers: at
# 128 heads, 128 x 4096, 281 us and not 249.
TILE_WIDTH = 128
VALUE_TILES = LATENT // TILE_WIDTH
OWN_TILES = VALUE_TILES // 2  # of one attending warpgroup
KEY_TILE = VALUE_TILES  # the last, of the channels that only keys have
# As tiles come free while both attending warpgroups go through theirs: so they are loaded and
# scored. The keys' own is free before any, for no value needs it: it goes last, and never waits.
ORDER = (*(each for own in range(OWN_TILES) for each in (own, OWN_TILES + own)), KEY_TILE)
# The largest scores up to each of the latest blocks. Behind them: each scoring warpgroup's sum.
TOPS = 4


def scratch(problem: Problem) -> dict[str, Any]:
    """By name. Barriers: of the places' tiles, of the two places, or one."""
    dtype, tiles = problem.dtype, KEY_TILE + 1
    return {
        "lines": plgpu.RefUnion(  # of one segment: first its queries, at last its outputs
            swizzled(ROWS, WIDTH, dtype, (1,)),
            swizzled(ROWS, HALF, dtype, (2,)),
        ),
        "shares": swizzled(ROWS, BLOCK, dtype),
        "values": swizzled(BLOCK, TILE_WIDTH, dtype, (2 * VALUE_TILES,)),
        "keys": swizzled(BLOCK, WIDTH - LATENT, dtype, (2,)),
        "tops": plgpu.SMEM((TOPS + 2, ROWS), jnp.float32),
        "full": plgpu.Barrier(num_barriers=2 * tiles),  # a tile was loaded
        "free": plgpu.Barrier(num_barriers=2 * VALUE_TILES),  # and was attended
        "ready": plgpu.Barrier(),  # the queries were loaded
        "topped": plgpu.Barrier(num_barriers=2),  # a block's largest scores are in tops
        "given": plgpu.Barrier(),  # a block's shares are in shares
        "taken": plgpu.Barrier(num_arrivals=2, num_barriers=2),  # and in both attending warpgroups
        "summed": plgpu.Barrier(num_arrivals=2),  # a segment's sums are in tops
        "stored": plgpu.Barrier(num_arrivals=2),  # a segment's outputs have left lines
    }


def tile_of(refs: SimpleNamespace, place: Any, tile: int) -> Any:
    """A tile of the block in a place, [tokens, channels]."""
    if tile == KEY_TILE:
        return refs.keys.at[place]
    return refs.values.at[place * VALUE_TILES + tile]


def full(refs: SimpleNamespace, place: Any, tile: int) -> Any:
    """The barrier of a tile that was loaded."""
    return refs.full.at[place * (KEY_TILE + 1) + tile]


def free(refs: SimpleNamespace, place: Any, tile: int) -> Any:
    """The barrier of a tile that was attended."""
    return refs.free.at[place * VALUE_TILES + tile]


def top_of(refs: SimpleNamespace, block: Any) -> Any:
    """The largest scores up to a block of the run, [ROWS], in units of log2."""
    return refs.tops.at[block % TOPS]


def top_before(refs: SimpleNamespace, block: Any) -> Any:
    """The largest scores up to the block before."""
    return refs.tops.at[(block + TOPS - 1) % TOPS]


def channels_of(tile: int) -> Any:
    """The channels of a key that a tile holds."""
    return pl.ds(tile * TILE_WIDTH, WIDTH - LATENT if tile == KEY_TILE else TILE_WIDTH)


def first_row(problem: Problem, refs: SimpleNamespace, segment: Segment) -> Any:
    """Of q and out: where the 64 rows of a segment begin, of this block's side of the heads."""
    first = refs.items[segment.item, TOKEN] * problem.heads + lax.axis_index("side") * ROWS
    return pl.multiple_of(first, 8)


def is_whole(refs: SimpleNamespace, segment: Segment) -> Any:
    """Whether a segment is all of its tile's blocks."""
    ends = segment.block + segment.count
    return (segment.block == 0) & (ends == refs.items[segment.item, BLOCKS])
