"""Numbers that every block of threads reads, each in a word of memory that says by itself whether
it is there: that spares a barrier of the whole grid, and the load of what lies behind it.

A word holds a number beside the round of the call that it belongs to. Whoever reads the round that
it waits for has read the number, so that nothing need be ordered.
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

from pallas_kernels.layer_chain.gpu_norm import layout_of
from pallas_kernels.layer_chain.gpu_plan import PARTS
from pallas_kernels.layer_chain.gpu_unit import SUMS

_NARROW = plgpu.Layout.WG_STRIDED((SUMS,), vec_size=1)
_SCALAR = plgpu.Layout.WG_SPLAT(())
_THREADS = 128
_LOW = 0xFFFF  # where a word of 4 bytes has its round; the number is above it

_SEND_SCORE = """
{
.reg .b64 word;
mov.b64 word, {$1, $2};
st.relaxed.gpu.global.b64 [$0], word;
}
"""
_RECEIVE_SCORE = """
{
.reg .pred waits;
.reg .b64 word;
.reg .b32 number, round;
AGAIN:
ld.relaxed.gpu.global.b64 word, [$0];
mov.b64 {number, round}, word;
setp.ne.u32 waits, round, $2;
@waits bra AGAIN;
st.shared.b32 [$1], number;
}
"""
_WATCH = f"""
{{
.reg .pred waits;
.reg .b32 differs;
AGAIN:
ld.relaxed.gpu.global.b32 differs, [$0];
xor.b32 differs, differs, $1;
and.b32 differs, differs, {_LOW};
setp.ne.u32 waits, differs, 0;
@waits bra AGAIN;
}}
"""


def send(words: Any, value: jax.Array, round_: Any) -> None:
    """The first numbers of bfloat16 [SUMS] to as many int32 of global memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _NARROW, _SCALAR))
    def store(ctx: Any, ref: Any, value: Any, round_: Any) -> None:
        del ctx
        i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
        thread = arith.andi(utils.thread_idx(), utils.c(SUMS - 1, i32))
        inside = arith.cmpi(arith.CmpIPredicate.ult, thread, utils.c(words.shape[0], i32))
        (each,) = value.registers.flat
        number = vector.extract(each, dynamic_position=[], static_position=[0])
        bits = arith.extui(i32, arith.bitcast(i16, number))
        word = arith.ori(arith.shli(bits, utils.c(16, i32)), _low(round_))
        address = _address(ref, arith.select(inside, thread, utils.c(0, i32)), 4)
        utils.inline_ptx(
            "st.relaxed.gpu.global.b32 [$0], $1;",
            address,
            word,
            predicate=inside,
            has_side_effects=True,
        )

    store(words, value, round_)


def receive(
    words: Any, width: int, columns: int, round_: Any, *, is_long: bool = False
) -> list[jax.Array]:
    """A token [PARTS, width] in chunks [PARTS, columns] of bfloat16, as soon as all of it is there.

    words: int32 [PARTS * width] of global memory. is_long: that will take a while, in which memory
    has better to do than to be asked for all of it: one word of each part is looked at until then.
    """
    chunks, layout = width // columns, layout_of(columns)
    each = PARTS * columns // _THREADS  # numbers of a chunk that a thread holds, side by side
    shape = (PARTS, columns)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR),
        return_type=[plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=layout)] * chunks,
    )
    def wait(ctx: Any, ref: Any, round_: Any) -> list[Any]:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.andi(utils.thread_idx(), utils.c(_THREADS - 1, i32))
        place = _own_number(thread, width, columns)
        firsts = [chunk * columns + at for chunk in range(chunks) for at in range(0, each, 4)]
        offsets = [4 * first for first in firsts]
        if is_long:
            part = arith.subi(place, arith.remui(place, utils.c(width, i32)))
            utils.inline_ptx(_WATCH, _address(ref, part, 4), _low(round_), has_side_effects=True)
        pairs = utils.inline_ptx(
            _waiting_load(offsets),
            _address(ref, place, 4),
            _low(round_),
            result_types=[i32] * (2 * len(offsets)),
            has_side_effects=True,
        )
        made, per_chunk = layout.to_mgpu(), each // 2
        return [
            _chunk(pairs[chunk * per_chunk : (chunk + 1) * per_chunk], shape, made)
            for chunk in range(chunks)
        ]

    return wait(words, round_)


def send_score(words: Any, value: jax.Array, round_: Any) -> None:
    """A float32 number to int32 [2] of global memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR))
    def send(ctx: Any, ref: Any, value: Any, round_: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        bits = arith.bitcast(i32, value.registers.item())
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            utils.inline_ptx(
                _SEND_SCORE,
                utils.memref_ptr(ref),
                bits,
                round_.registers.item(),
                has_side_effects=True,
            )

    send(words, value, round_)


def receive_scores(words: Any, scores: Any, count: int, round_: Any) -> None:
    """float32 [count] to shared memory. words: int32 [2 * count] of global memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR))
    def wait(ctx: Any, ref: Any, scores: Any, round_: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.andi(utils.thread_idx(), utils.c(_THREADS - 1, i32))
        start = llvm.ptrtoint(i32, utils.memref_ptr(scores))
        utils.warpgroup_barrier()  # nobody reads any more what was there
        for first in range(0, count, _THREADS):
            number = arith.addi(thread, utils.c(first, i32))
            number = arith.minui(number, utils.c(count - 1, i32))
            utils.inline_ptx(
                _RECEIVE_SCORE,
                _address(ref, number, 8),
                arith.addi(start, arith.muli(number, utils.c(4, i32))),
                round_.registers.item(),
                has_side_effects=True,
            )
        utils.warpgroup_barrier()

    wait(words, scores, round_)


def _waiting_load(offsets: list[int]) -> str:
    """PTX: four words from each offset (bytes), until all have the round; then their numbers."""
    words = [f"w{i}" for i in range(4 * len(offsets))]
    lines = [
        "{",
        ".reg .pred waits;",
        ".reg .b64 from;",
        f".reg .b32 round, differs, {', '.join(words)};",
        f"mov.b64 from, ${2 * len(offsets)};",
        f"mov.b32 round, ${2 * len(offsets) + 1};",
        "AGAIN:",
    ]
    for which, offset in enumerate(offsets):
        four = ", ".join(words[4 * which : 4 * which + 4])
        lines.append(f"ld.relaxed.gpu.global.v4.b32 {{{four}}}, [from + {offset}];")
    lines.append("xor.b32 differs, w0, round;")
    for word in words[1:]:  # differs |= word ^ round
        lines.append(f"lop3.b32 differs, differs, {word}, round, 0xf6;")
    lines += [f"and.b32 differs, differs, {_LOW};", "setp.ne.u32 waits, differs, 0;"]
    lines.append("@waits bra AGAIN;")
    for pair in range(len(words) // 2):
        lines.append(f"prmt.b32 ${pair}, w{2 * pair}, w{2 * pair + 1}, 0x7632;")
    return "\n".join([*lines, "}"])


def _own_number(thread: Any, width: int, columns: int) -> Any:
    """The first number of a token [PARTS, width] that a thread holds by `layout_of`."""
    i32 = ir.IntegerType.get_signless(32)

    def parts(value: Any, by: int) -> tuple[Any, Any]:
        return arith.divui(value, utils.c(by, i32)), arith.remui(value, utils.c(by, i32))

    def sum_of(*terms: tuple[Any, int]) -> Any:
        first, *rest = (arith.muli(value, utils.c(by, i32)) for value, by in terms)
        for each in rest:
            first = arith.addi(first, each)
        return first

    warp, lane = parts(thread, 32)
    if columns == 64:  # two rows a warp, 16 lanes a row
        upper, across = parts(lane, 16)
        return sum_of((warp, 2 * width), (upper, width), (across, 4))
    down, right = parts(warp, 2)  # four rows a warp and half of the columns, 8 lanes a row
    upper, across = parts(lane, 8)
    return sum_of((down, 4 * width), (right, 64), (upper, width), (across, 8))


def _chunk(pairs: Any, shape: tuple[int, int], layout: Any) -> Any:
    """A thread's numbers, two in each of `pairs`, as its part of an array."""
    i32, bf16 = ir.IntegerType.get_signless(32), ir.BF16Type.get()
    whole = vector.from_elements(ir.VectorType.get((len(pairs),), i32), list(pairs))
    numbers = vector.bitcast(ir.VectorType.get((2 * len(pairs),), bf16), whole)
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    registers.fill(numbers)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _low(round_: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return arith.andi(round_.registers.item(), utils.c(_LOW, i32))


def _address(ref: Any, number: Any, size: int) -> Any:
    """Of the numbers' global memory that of one. size: bytes of each."""
    i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
    return utils.getelementptr(utils.memref_ptr(ref), [arith.muli(number, utils.c(size, i32))], i8)
