"""MXFP4 expert weights (OCP Microscaling 1.0): 4-bit floats, 32 of them with one power of two.

NAME_blocks [experts, out, in / 32, 16] holds two numbers a byte, the low half first, and
NAME_scales [experts, out, in / 32] the exponents; unquantized NAME is [experts, in, out].
"""

from collections.abc import Mapping

import numpy as np

from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.source import TensorInfo, TensorSource, printable_name, slice_bounds

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP, _BYTES = 32, 16
_BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)


class Mxfp4Source:
    """A `TensorSource` of wide tensors over one of blocks and scales.

    Other tensors are passed through. Raises `CheckpointError` where blocks and scales do not fit
    together.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        stored = source.tensors()
        self._narrow = {
            name.removesuffix(_BLOCKS)
            for name, info in stored.items()
            if name.endswith(_BLOCKS) and info.dtype == np.uint8
        }
        parts = {name + part for name in self._narrow for part in (_BLOCKS, _SCALES)}
        self._tensors = {name: info for name, info in stored.items() if name not in parts}
        for name in sorted(self._narrow):
            self._tensors[name] = _wide(name, stored[name + _BLOCKS], stored.get(name + _SCALES))

    @property
    def description(self) -> str:
        """One line for people."""
        return f"{self._source.description} (MXFP4)"

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name; narrow ones in float32, which holds each of their values."""
        return self._tensors

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read a slice; of a narrow tensor only the groups that it touches."""
        if name not in self._narrow:
            return self._source.read(name, index)
        experts, inputs, outputs = slice_bounds(name, self._tensors[name].shape, index)
        groups = (inputs[0] // _GROUP, -(-inputs[1] // _GROUP))
        box = tuple(slice(*bounds) for bounds in (experts, outputs, groups))
        blocks = self._source.read(name + _BLOCKS, (*box, slice(None)))
        exponents = self._source.read(name + _SCALES, box).astype(np.int32) - _BIAS
        pairs = np.stack([_VALUES[blocks & 0xF], _VALUES[blocks >> 4]], axis=-1)
        values = np.ldexp(pairs, exponents[..., None, None])
        values = values.reshape(*values.shape[:2], -1)
        first = groups[0] * _GROUP
        values = values[:, :, inputs[0] - first : inputs[1] - first]
        return np.ascontiguousarray(values.transpose(0, 2, 1))


def _wide(name: str, blocks: TensorInfo, scales: TensorInfo | None) -> TensorInfo:
    shown = printable_name(name)
    if len(blocks.shape) != 4 or blocks.shape[3] != _BYTES:
        raise CheckpointError(
            f"{shown}{_BLOCKS}: found shape {list(blocks.shape)}, expected "
            f"[experts, out, groups, {_BYTES}]"
        )
    experts, outputs, groups, _ = blocks.shape
    if scales is None:
        raise CheckpointError(f"{shown}{_SCALES} is missing: {shown}{_BLOCKS} has no scales")
    if scales.shape != (experts, outputs, groups) or scales.dtype != np.uint8:
        raise CheckpointError(
            f"{shown}{_SCALES}: found {scales.dtype_name} {list(scales.shape)}, expected U8 "
            f"{[experts, outputs, groups]}, one for each group of the blocks"
        )
    shape = (experts, groups * _GROUP, outputs)
    return TensorInfo(name, shape, np.dtype(np.float32), blocks.origin)
