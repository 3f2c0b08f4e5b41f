"""Weights on their way to the L2 before they are asked for: few rows leave memory idle."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
from jax import lax
from jax._src.lib.mlir import ir
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

# Bytes. Of 50 MB that the L2 holds; a Llama-8B step of one row: 4.04 ms without, 3.97 with these,
# 3.99 with 32 MB.
AHEAD = 8 << 20
_AT_ONCE = 16 * 1024  # bytes of one request


def bring_near(weight: Any, blocks: int) -> None:
    """Ask for this block's share of a weight's first bytes. weight: bfloat16 [numbers]."""
    requests = min(AHEAD, 2 * weight.shape[0]) // _AT_ONCE // blocks
    if not requests:
        return
    block = lax.axis_index("block")
    start = pl.multiple_of(block * (requests * _AT_ONCE // 2), 8)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def ask(ctx: Any, weight: Any) -> None:
        del ctx
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        pointer = utils.memref_ptr(weight)
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            for request in range(requests):
                utils.inline_ptx(
                    "cp.async.bulk.prefetch.L2.global [$0], $1;",
                    utils.getelementptr(pointer, [request * _AT_ONCE], i8),
                    utils.c(_AT_ONCE, i32),
                    has_side_effects=True,
                )

    ask(weight.at[pl.ds(start, 8)])
