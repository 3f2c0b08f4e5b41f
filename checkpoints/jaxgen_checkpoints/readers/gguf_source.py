"""A GGUF file in Hugging Face clothes: its names, its row order, float32 dequantised by rows."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Kind

from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.readers.file_slices import read_box
from jaxgen_checkpoints.readers.gguf_header import GGUFHeader, GGUFTensor
from jaxgen_checkpoints.readers.gguf_names import hf_name, stored_rows
from jaxgen_checkpoints.source import TensorInfo, printable_name, slice_bounds

KINDS = (
    Kind.F32,
    Kind.F16,
    Kind.BF16,
    Kind.Q8_0,
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
)
# Dequantising makes several temporaries of the size of its input: rows go through it in pieces.
_PIECE_ELEMENTS = 1 << 20
_INTERLEAVED = (".q_proj.weight", ".q_proj.bias", ".k_proj.weight", ".k_proj.bias")


class GGUFSource:
    """The tensors of one GGUF file, dequantised to float32 when they are read."""

    def __init__(
        self,
        path: Path,
        header: GGUFHeader,
        *,
        interleaved_head: int | None,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        """Present the tensors of `header`, except those in `hidden` (the file's names).

        `interleaved_head` is the head size if query and key rows are stored with rotary pairs side
        by side, else None. Raises `CheckpointError` for a tensor of a type that is not read.
        """
        self._path = path
        self._head = interleaved_head
        self._stored = {
            hf_name(name): tensor for name, tensor in header.tensors.items() if name not in hidden
        }
        if len(self._stored) != len(header.tensors.keys() - hidden):
            raise CheckpointError(f"{path}: two tensors stand for the same Hugging Face name")
        _check_kinds(path, self._stored)
        if interleaved_head is not None:
            _check_heads(path, self._stored, interleaved_head)
        self._infos = {
            name: TensorInfo(name, stored.shape, np.dtype(np.float32), path.name)
            for name, stored in self._stored.items()
        }
        kinds = sorted({stored.kind.name for stored in self._stored.values()})
        self.description = f"GGUF file {path} ({', '.join(kinds)})"

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its Hugging Face name; one that has none keeps the file's."""
        return self._infos

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read `tensor[index]` as float32; whole blocks are read and cut afterwards."""
        stored = self._stored[name]
        bounds = slice_bounds(name, stored.shape, index)
        result = np.empty(tuple(stop - start for start, stop in bounds), np.float32)
        if not result.size:
            return result
        first, last = bounds[0]
        step = max(1, _PIECE_ELEMENTS * (last - first) // result.size)
        for start in range(first, last, step):
            stop = min(start + step, last)
            result[start - first : stop - first] = self._rows(name, start, stop, bounds[1:])
        return result

    def _rows(
        self, name: str, start: int, stop: int, inner: tuple[tuple[int, int], ...]
    ) -> np.ndarray:
        stored = self._stored[name]
        if self._head is None or not name.endswith(_INTERLEAVED):
            return _dequantised(self._path, stored, ((start, stop), *inner))
        rows = stored_rows(start, stop, self._head)
        low, high = int(rows.min()), int(rows.max()) + 1
        return _dequantised(self._path, stored, ((low, high), *inner))[rows - low]


def _dequantised(path: Path, stored: GGUFTensor, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Read the blocks that cover the box `bounds`, dequantise them, cut the last axis to it."""
    block, block_bytes = GGML_QUANT_SIZES[stored.kind]
    start, stop = bounds[-1]
    blocks = (start // block, -(-stop // block))
    raw = read_box(
        path,
        stored.begin,
        (*stored.shape[:-1], stored.shape[-1] // block, block_bytes),
        np.dtype(np.uint8),
        (*bounds[:-1], blocks, (0, block_bytes)),
    )
    rows = raw.reshape(*raw.shape[:-2], -1)
    values = quants.dequantize(rows, stored.kind)
    skipped = blocks[0] * block
    return values[..., start - skipped : stop - skipped]


def _check_kinds(path: Path, stored: Mapping[str, GGUFTensor]) -> None:
    refused = {
        name: tensor.kind.name for name, tensor in stored.items() if tensor.kind not in KINDS
    }
    if refused:
        name, kind = next(iter(refused.items()))
        raise CheckpointError(
            f"{path}: {len(refused)} tensors are of types that are not read "
            f"({', '.join(sorted(set(refused.values())))}; {printable_name(name)} is {kind}); "
            f"read are {', '.join(kind.name for kind in KINDS)}"
        )


def _check_heads(path: Path, stored: Mapping[str, GGUFTensor], head_dim: int) -> None:
    for name, tensor in stored.items():
        if name.endswith(_INTERLEAVED) and tensor.shape[0] % head_dim:
            raise CheckpointError(
                f"{path}: {printable_name(name)}: {tensor.shape[0]} rows are no multiple of "
                f"the head size {head_dim}"
            )
