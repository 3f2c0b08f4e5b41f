"""A count in memory that some blocks of threads bring up to what all of them wait for."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

# One thread speaks for its warpgroup, whose writes it publishes, or for which it has waited.
_UP = "red.release.gpu.global.add.u32 [$0], 1;"
_AWAIT = """
{{
.reg .pred waits;
.reg .b32 now;
AGAIN:
ld.relaxed.gpu.global.b32 now, [$0];
setp.lt.u32 waits, now, {goal};
@waits bra AGAIN;
fence.acq_rel.gpu;
}}
"""
_ANEW = "st.relaxed.gpu.global.b32 [$0], 0;"


def count_up(count: Any) -> None:
    """Tell who waits that this warpgroup's writes to global memory are there. count: int32 [1]."""
    _by_one_thread(count, _UP)


def await_count(count: Any, goal: int) -> None:
    """Wait until `goal` warpgroups have counted; all threads see what those have written."""
    _by_one_thread(count, _AWAIT.format(goal=goal))


def begin_anew(count: Any) -> None:
    """Back to zero, by the first block of threads; nobody may be waiting."""

    @pl.when(lax.axis_index("block") == 0)
    def _first() -> None:
        _by_one_thread(count, _ANEW)


def _by_one_thread(count: Any, code: str) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(ctx: Any, count: Any) -> None:
        del ctx
        pointer = utils.memref_ptr(count)
        utils.warpgroup_barrier()
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            utils.inline_ptx(code, pointer, has_side_effects=True, convergent=True)
        utils.warpgroup_barrier()

    run(count)
