"""fp8 weights with one float32 scale for each block of rows and columns, as DeepSeek-V3 has them.

NAME.weight is stored beside NAME.weight_scale_inv, by which its blocks are to be multiplied.
"""

from collections.abc import Mapping

import numpy as np

from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.source import (
    DTYPE_NAMES,
    TensorInfo,
    TensorSource,
    printable_name,
    slice_bounds,
)

_SUFFIX = "_scale_inv"
_NARROW = (DTYPE_NAMES["F8_E4M3"], DTYPE_NAMES["F8_E5M2"])
_SCALES = tuple(DTYPE_NAMES[name] for name in ("F32", "BF16", "F16", "F8_E8M0"))


class Fp8BlockSource:
    """A `TensorSource` of wide tensors over one of fp8 tensors and their scales.

    Tensors without scales are passed through. Raises `CheckpointError` where scales have no weight
    or do not fit it.
    """

    def __init__(self, source: TensorSource, block: tuple[int, int]) -> None:
        self._source = source
        self._block = block
        stored = source.tensors()
        scales = {name: info for name, info in stored.items() if name.endswith(_SUFFIX)}
        self._scaled = {name.removesuffix(_SUFFIX) for name in scales}
        for name, info in scales.items():
            self._check(name, info, stored.get(name.removesuffix(_SUFFIX)))
        self._tensors = {
            name: self._wide(info) if name in self._scaled else info
            for name, info in stored.items()
            if name not in scales
        }

    @property
    def description(self) -> str:
        """One line for people."""
        return f"{self._source.description} (fp8 in blocks)"

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, in float32 where it has scales; the scales are not among them."""
        return self._tensors

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read a slice, with the scales of the blocks that it touches applied."""
        if name not in self._scaled:
            return self._source.read(name, index)
        values = self._source.read(name, index).astype(np.float32)
        bounds = slice_bounds(name, self._tensors[name].shape, index)
        if not values.size:
            return values
        blocks = tuple(
            slice(start // size, -(-stop // size))
            for (start, stop), size in zip(bounds, self._block, strict=True)
        )
        scales = self._source.read(name + _SUFFIX, blocks).astype(np.float32)
        for axis, ((start, stop), size) in enumerate(zip(bounds, self._block, strict=True)):
            places = np.arange(start, stop) // size - start // size
            scales = np.take(scales, places, axis)
        values *= scales
        return values

    def _wide(self, info: TensorInfo) -> TensorInfo:
        return TensorInfo(info.name, info.shape, np.dtype(np.float32), info.origin)

    def _check(self, name: str, scales: TensorInfo, weight: TensorInfo | None) -> None:
        shown = printable_name(name)
        if min(self._block) < 1:
            raise CheckpointError(f"weight_block_size = {list(self._block)} must be positive")
        if weight is None:
            raise CheckpointError(f"{shown}: scales of a weight that the checkpoint has not got")
        if weight.dtype not in _NARROW or len(weight.shape) != 2:
            raise CheckpointError(
                f"{shown}: expected scales of an fp8 matrix, got those of {weight.dtype_name} "
                f"{list(weight.shape)}"
            )
        wanted = [-(-n // size) for n, size in zip(weight.shape, self._block, strict=True)]
        if list(scales.shape) != wanted or scales.dtype not in _SCALES:
            raise CheckpointError(
                f"{shown}: found {scales.dtype_name} {list(scales.shape)}, expected floating "
                f"{wanted}: one for each block of {list(self._block)} of {list(weight.shape)}"
            )
