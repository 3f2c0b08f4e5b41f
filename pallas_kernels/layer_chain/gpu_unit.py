"""A unit of output in registers, one number a thread: its sums, its way from and to memory.

Thread t of a warpgroup holds token t // UNIT, column t % UNIT, for eight tokens of which the
problem may have fewer. Pallas has no such layout for rows that are not contiguous in memory.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layer_chain.gpu_plan import PARTS, UNIT

TOKENS = 8
SUMS = TOKENS * UNIT  # one a thread
_NARROW = plgpu.Layout.WG_STRIDED((SUMS,), vec_size=1)
_WIDE = plgpu.Layout.WG_STRIDED((SUMS * PARTS,), vec_size=PARTS)


def sum_parts(parts: Any, interpret: bool) -> jax.Array:
    """float32 [SUMS * PARTS] in shared memory to [SUMS]: each run of PARTS is added up."""
    value = plgpu.load(parts, layout=_WIDE, optimized=False)
    if interpret:
        return value.reshape(SUMS, PARTS).sum(axis=1)

    @plgpu.inline_mgpu(arg_types=(_WIDE,), return_type=_result(jnp.float32))
    def add(ctx: Any, value: Any) -> Any:
        del ctx
        (each,) = value.registers.flat
        numbers = [
            vector.extract(each, dynamic_position=[], static_position=[i]) for i in range(PARTS)
        ]
        while len(numbers) > 1:
            pairs = zip(numbers[::2], numbers[1::2], strict=True)
            numbers = [arith.addf(a, b) for a, b in pairs]
        return _array(numbers[0])

    return add(value)


def load_unit(first: Any, rows: int, stride: int, interpret: bool) -> jax.Array:
    """bfloat16 [SUMS] from global memory; of tokens past the last, anything.

    first: Ref [UNIT], the first token's; stride: numbers from one token to the next.
    """
    if interpret:
        ref, (row, columns) = first
        step = stride // ref.shape[1]
        tokens = [ref[row + token * step, columns] for token in range(rows)]
        return jnp.pad(jnp.concatenate(tokens), (0, (TOKENS - rows) * UNIT))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_result(jnp.bfloat16))
    def load(ctx: Any, ref: Any) -> Any:
        del ctx
        address, _ = _address(ref, rows, stride)
        i16 = ir.IntegerType.get_signless(16)
        bits = utils.inline_ptx(
            "ld.global.b16 $0, [$1];", address, result_types=i16, has_side_effects=True
        )
        return _array(arith.bitcast(ir.BF16Type.get(), bits))

    ref, at = first
    return load(ref.at[at])


def store_unit(first: Any, value: jax.Array, rows: int, stride: int, interpret: bool) -> None:
    """The reverse of load_unit; nothing is written for tokens past the last."""
    if interpret:
        ref, (row, columns) = first
        step = stride // ref.shape[1]
        for token in range(rows):
            ref[row + token * step, columns] = value[token * UNIT : (token + 1) * UNIT]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _NARROW))
    def store(ctx: Any, ref: Any, value: Any) -> None:
        del ctx
        address, inside = _address(ref, rows, stride)
        (each,) = value.registers.flat
        number = vector.extract(each, dynamic_position=[], static_position=[0])
        bits = arith.bitcast(ir.IntegerType.get_signless(16), number)
        utils.inline_ptx(
            "st.global.b16 [$0], $1;", address, bits, predicate=inside, has_side_effects=True
        )

    ref, at = first
    store(ref.at[at], value)


def _result(dtype: Any) -> Any:
    return plgpu.ShapeDtypeStruct((SUMS,), dtype, layout=_NARROW)


def _array(number: Any) -> Any:
    """A thread's number as one of the warpgroup's array."""
    registers = np.empty((1,), dtype=object)
    registers[0] = vector.from_elements(ir.VectorType.get((1,), number.type), [number])
    layout = mgpu.WGStridedFragLayout((SUMS,), 1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _address(ref: Any, rows: int, stride: int) -> tuple[Any, Any]:
    """A thread's own address, and whether its token is one; if not, the first token's address."""
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    thread = arith.andi(utils.thread_idx(), utils.c(SUMS - 1, i32))
    token = arith.divui(thread, utils.c(UNIT, i32))
    column = arith.remui(thread, utils.c(UNIT, i32))
    inside = arith.cmpi(arith.CmpIPredicate.ult, token, utils.c(rows, i32))
    token = arith.select(inside, token, utils.c(0, i32))
    number = arith.addi(arith.muli(token, utils.c(stride, i32)), column)
    start = llvm.ptrtoint(i64, utils.memref_ptr(ref))
    offset = arith.muli(arith.extui(i64, number), utils.c(2, i64))
    pointer = llvm.inttoptr(llvm.PointerType.get(address_space=1), arith.addi(start, offset))
    return pointer, inside
