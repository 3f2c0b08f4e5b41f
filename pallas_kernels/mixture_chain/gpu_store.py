"""Units of float32 numbers, one number a thread, from shared and to global memory."""

from typing import Any

import jax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, vector
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layer_chain.gpu_plan import UNIT
from pallas_kernels.layer_chain.gpu_unit import SUMS

_NARROW = plgpu.Layout.WG_STRIDED((SUMS,), vec_size=1)


def load_numbers(source: Any, first: int, interpret: bool) -> jax.Array:
    """[SUMS] of shared memory from `first` on, of which the first UNIT are wanted."""
    del interpret
    return plgpu.load(source.at[pl.ds(first, SUMS)], layout=_NARROW, optimized=False)


def store_numbers(target: Any, unit: Any, value: jax.Array, interpret: bool) -> None:
    """The first UNIT of float32 [SUMS] to a unit of global memory."""
    place = target.at[pl.ds(pl.multiple_of(unit * UNIT, UNIT), UNIT)]
    if interpret:
        target[pl.ds(unit * UNIT, UNIT)] = value[:UNIT]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _NARROW))
    def store(ctx: Any, ref: Any, value: Any) -> None:
        del ctx
        i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        thread = arith.andi(utils.thread_idx(), utils.c(SUMS - 1, i32))
        inside = arith.cmpi(arith.CmpIPredicate.ult, thread, utils.c(UNIT, i32))
        thread = arith.select(inside, thread, utils.c(0, i32))
        offset = arith.muli(thread, utils.c(4, i32))
        address = utils.getelementptr(utils.memref_ptr(ref), [offset], i8)
        (each,) = value.registers.flat
        number = vector.extract(each, dynamic_position=[], static_position=[0])
        utils.inline_ptx(
            "st.global.f32 [$0], $1;", address, number, predicate=inside, has_side_effects=True
        )

    store(place, value)
