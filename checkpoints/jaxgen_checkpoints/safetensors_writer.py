"""Writing a safetensors file tensor by tensor: the header first, from shapes alone."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from jaxgen_checkpoints.source import DTYPE_NAMES

_ALIGNMENT = 8
_NAME_OF = {dtype: name for name, dtype in DTYPE_NAMES.items()}


def write_safetensors(
    path: Path,
    described: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    tensors: Iterable[np.ndarray],
) -> None:
    """Write `tensors`, made one at a time, in the order of `described` (name -> shape, dtype).

    The file appears under its name only when it is complete.
    """
    header, begin = {}, 0
    for name, (shape, dtype) in described.items():
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAME_OF[dtype],
            "shape": [int(size) for size in shape],
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (shape, dtype), values in zip(described.values(), tensors, strict=True):
            if values.shape != tuple(shape) or values.dtype != dtype:
                raise ValueError(f"expected {shape} {dtype}, got {values.shape} {values.dtype}")
            file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    os.replace(partial, path)
