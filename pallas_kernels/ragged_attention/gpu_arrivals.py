"""Who comes last: the workers of a cut row count themselves, and the last one joins its parts.

The counters are zeros before a kernel and zeros after it, so all calls of a step share one array.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref

_REFS = (plgpu.RefType(), plgpu.RefType())


def arrive(counter: Any, ticket: Any) -> None:
    """Count this worker in; ticket (an int32 in shared memory) is how many came before.

    What the warpgroup wrote to global memory before is visible to whoever counts itself later.
    """

    @plgpu.inline_mgpu(arg_types=_REFS)
    def count(ctx: Any, counter: ir.Value, ticket: ir.Value) -> None:
        del ctx
        # Parts are written by the copy engine and read by it: both sides fence its proxy too.
        mgpu.utils.inline_ptx("fence.proxy.async;", has_side_effects=True)
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            before = mgpu.utils.inline_ptx(
                "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;",
                mgpu.utils.memref_ptr(counter),
                result_types=ir.IntegerType.get_signless(32),
                has_side_effects=True,
            )
            memref.store(before, ticket, [])
        mgpu.utils.warpgroup_barrier()
        mgpu.utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

    count(counter, ticket)


def arrived(counter: Any, ticket: Any) -> None:
    """How many have come so far, in ticket; what they wrote before is visible from here on."""

    @plgpu.inline_mgpu(arg_types=_REFS)
    def look(ctx: Any, counter: ir.Value, ticket: ir.Value) -> None:
        del ctx
        mgpu.utils.warpgroup_barrier()  # all have read what ticket was before
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            before = mgpu.utils.inline_ptx(
                "ld.acquire.gpu.global.u32 $0, [$1];",
                mgpu.utils.memref_ptr(counter),
                result_types=ir.IntegerType.get_signless(32),
                has_side_effects=True,
            )
            memref.store(before, ticket, [])
        mgpu.utils.warpgroup_barrier()
        mgpu.utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

    look(counter, ticket)


def start_over(counter: Any, ticket: Any) -> None:
    """The last worker sets the counter back to zero for the next kernel."""

    @plgpu.inline_mgpu(arg_types=_REFS)
    def clear(ctx: Any, counter: ir.Value, ticket: ir.Value) -> None:
        del ctx, ticket
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            mgpu.utils.inline_ptx(
                "st.relaxed.gpu.global.u32 [$0], 0;",
                mgpu.utils.memref_ptr(counter),
                has_side_effects=True,
            )

    clear(counter, ticket)
