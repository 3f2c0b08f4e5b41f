"""What a checkpoint is to everybody above: named tensors, of which slices can be read.

A reader (safetensors, GGUF, memory, Orbax) is one implementation of `TensorSource`; nothing above
the readers knows which one it has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

DTYPE_NAMES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Element types as checkpoint files name them (the safetensors spelling), in numpy's terms."""

_NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known about a tensor before any of its bytes is read.

    `dtype` is what `TensorSource.read` returns: ml_dtypes for bfloat16 and fp8; float32 for every
    GGUF tensor, since those are dequantised. `origin` is the file it comes from, for messages.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    origin: str

    @property
    def dtype_name(self) -> str:
        """The type as checkpoint files spell it (`BF16`, `I32`), for messages."""
        return _NAME_OF_DTYPE.get(self.dtype, str(self.dtype))


class TensorSource(Protocol):
    """Named tensors that can be described for free and read by slices."""

    @property
    def description(self) -> str:
        """One line for people: `2 safetensors files in DIR`."""
        ...

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name. Cheap: headers were read and checked when it was opened."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read `tensor[index]`; one slice of step 1 per axis.

        Only the bytes (rows, blocks) that the slice needs are read, and nothing stays mapped
        afterwards. The result owns its memory. Raises `KeyError` for a name that `tensors()` does
        not hold.
        """
        ...


def printable_name(name: str) -> str:
    """`name` with everything that a terminal would not show as itself written as an escape.

    Names come from files: they may hold control characters or marks that turn the text round.
    """
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def slice_bounds(
    name: str, shape: tuple[int, ...], index: tuple[slice, ...]
) -> tuple[tuple[int, int], ...]:
    """Turn `index` into one `(start, stop)` per axis, start <= stop <= size.

    Raises `ValueError` unless there is exactly one slice of step 1 per axis: a programming error of
    the caller, never something that a file can cause.
    """
    if len(index) != len(shape):
        raise ValueError(
            f"{name}: expected {len(shape)} slices for shape {list(shape)}, got {len(index)}; "
            "pass one slice per axis"
        )
    bounds = []
    for part, size in zip(index, shape, strict=True):
        start, stop, step = part.indices(size)
        if step != 1:
            raise ValueError(
                f"{name}: expected slices of step 1, got step {step}; read, then stride"
            )
        bounds.append((start, max(start, stop)))
    return tuple(bounds)
