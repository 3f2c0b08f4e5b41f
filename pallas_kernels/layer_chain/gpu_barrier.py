"""A barrier of the whole grid: blocks of threads count up, and wait for a round to be full."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

# One thread of each block: what its block has written is published with its arrival. The count only
# grows, by a whole number of rounds in a launch.
_MEET = """
{{
.reg .pred waits;
.reg .b32 count, goal, now;
atom.release.gpu.global.add.u32 count, [$0], 1;
div.u32 goal, count, {blocks};
mul.lo.u32 goal, goal, {blocks};
add.u32 goal, goal, {blocks};
AGAIN:
ld.relaxed.gpu.global.b32 now, [$0];
sub.u32 now, now, goal;
setp.lt.s32 waits, now, 0;
@waits bra AGAIN;
fence.acq_rel.gpu;
}}
"""
# What is written plainly is read by the copy engine.
_TO_COPY_ENGINE = "fence.proxy.async.global;"


def meet(state: Any, blocks: int) -> None:
    """Wait until every block's warpgroup is here; all see what all have written to global memory.

    state: int32 in global memory, whose first number is zero before its first use. Every block must
    be resident.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def barrier(ctx: Any, state: Any) -> None:
        del ctx
        pointer = utils.memref_ptr(state)
        utils.inline_ptx(_TO_COPY_ENGINE, has_side_effects=True)
        utils.warpgroup_barrier()
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            utils.inline_ptx(
                _MEET.format(blocks=blocks), pointer, has_side_effects=True, convergent=True
            )
        utils.warpgroup_barrier()
        utils.inline_ptx(_TO_COPY_ENGINE, has_side_effects=True)

    barrier(state)
