"""Memory on its way to the L2 of a Hopper GPU before it is asked for."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
from jax._src.lib.mlir import ir
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu


def bring_to_l2(first: Any, requests: int, size: int) -> None:
    """Ask for what lies from the beginning of `first`, a Ref in global memory, in so many requests
    of size bytes, a multiple of 16; one thread of a warpgroup that comes here asks.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def ask(ctx: Any, first: Any) -> None:
        del ctx
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        pointer = utils.memref_ptr(first)
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            for request in range(requests):
                utils.inline_ptx(
                    "cp.async.bulk.prefetch.L2.global [$0], $1;",
                    utils.getelementptr(pointer, [request * size], i8),
                    utils.c(size, i32),
                    has_side_effects=True,
                )

    ask(first)
