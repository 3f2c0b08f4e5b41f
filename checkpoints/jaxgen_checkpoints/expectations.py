"""What a source tensor must be like before anything is made of it, and what to say if not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from jaxgen_checkpoints.dim import explain_shape
from jaxgen_checkpoints.lazy import LazyTensor, lazy
from jaxgen_checkpoints.source import DTYPE_NAMES, TensorInfo

FLOATING = frozenset(DTYPE_NAMES[name] for name in ("F64", "F32", "F16", "BF16"))
"""Element types that weights may have; anything else needs scales that nobody gave."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with one tensor of the checkpoint."""

    tensor: str
    text: str


def check_tensor(tensor: LazyTensor, expected: Sequence[int]) -> Iterator[Problem]:
    """Yield what is wrong with a tensor: its shape, then its element type."""
    name = ", ".join(sorted(tensor.sources))
    if tensor.shape != tuple(expected):
        text = f"found shape {list(tensor.shape)}, expected {explain_shape(expected)}"
        if len(tensor.shape) > 1 and tensor.shape == tuple(reversed(expected)):
            text += "; it looks transposed"
        yield Problem(name, text)
    if tensor.dtype not in FLOATING:
        yield Problem(name, _explain_dtype(tensor.dtype))


def placeholder(name: str, shape: Sequence[int]) -> LazyTensor:
    """A float32 tensor of this shape that can be described but not read."""
    info = TensorInfo(name, tuple(int(size) for size in shape), np.dtype(np.float32), "nowhere")
    return lazy(info, _Nowhere())


class _Nowhere:
    description = "no checkpoint, shapes only"

    def tensors(self) -> dict[str, TensorInfo]:
        return {}

    def read(self, name: str, index: tuple[slice, ...]) -> NoReturn:
        raise RuntimeError(f"{name} is only a shape; it has no values to read")


def _explain_dtype(dtype: np.dtype) -> str:
    spelled = next((name for name, known in DTYPE_NAMES.items() if known == dtype), str(dtype))
    wanted = "expected a floating type (F32, F16, BF16)"
    if "float" in str(dtype):
        return f"has type {spelled} but no scales; {wanted}: this quantization is not supported"
    return f"has type {spelled}, {wanted}; it is not cast in silence"
