"""pytorch_model.bin as a `TensorSource`, for converting it to safetensors and for nothing else.

The file is a pickle. Only torch's `weights_only` loader, which builds tensors and plain containers
and runs no code of the file's, may touch it; it is not used to serve.
"""

import importlib
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.readers.file_slices import regular_file_size
from jaxgen_checkpoints.readers.shard_index import read_index
from jaxgen_checkpoints.source import DTYPE_NAMES, TensorInfo, printable_name, slice_bounds

SINGLE_NAME = "pytorch_model.bin"
INDEX_NAME = "pytorch_model.bin.index.json"
_DTYPES = {
    "float64": DTYPE_NAMES["F64"],
    "float32": DTYPE_NAMES["F32"],
    "float16": DTYPE_NAMES["F16"],
    "bfloat16": DTYPE_NAMES["BF16"],
    "float8_e4m3fn": DTYPE_NAMES["F8_E4M3"],
    "float8_e5m2": DTYPE_NAMES["F8_E5M2"],
    "int64": DTYPE_NAMES["I64"],
    "int32": DTYPE_NAMES["I32"],
    "int16": DTYPE_NAMES["I16"],
    "int8": DTYPE_NAMES["I8"],
    "uint8": DTYPE_NAMES["U8"],
    "bool": DTYPE_NAMES["BOOL"],
}


class TorchBinSource:
    """Tensors of state dictionaries that torch has mapped into memory."""

    def __init__(
        self, folder: Path, torch: ModuleType, states: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Take `states`, file name -> state dictionary.

        Raises `CheckpointError` for an entry that is not a dense tensor of a known type, and for a
        tensor in two files.
        """
        self._torch = torch
        self._tensors: dict[str, Any] = {}
        self._infos: dict[str, TensorInfo] = {}
        for file, state in states.items():
            for info in _infos(folder / file, torch, state):
                if info.name in self._infos:
                    raise CheckpointError(
                        f"{folder}: tensor {printable_name(info.name)} is in "
                        f"{self._infos[info.name].origin} and {file}"
                    )
                self._infos[info.name] = info
                self._tensors[info.name] = state[info.name]
        self.description = f"{len(states)} pytorch_model.bin files in {folder}"

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, in the files' order."""
        return self._infos

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Copy `tensor[index]`, in the stored dtype."""
        info = self._infos[name]
        bounds = slice_bounds(name, info.shape, index)
        part = self._tensors[name].detach()
        for axis, (start, stop) in enumerate(bounds):
            part = part.narrow(axis, start, stop - start)
        part = part.contiguous().reshape(-1)
        sizes = tuple(stop - start for start, stop in bounds)
        # numpy does not know bfloat16 and fp8, so bytes travel, whatever the type.
        return part.view(self._torch.uint8).numpy().copy().view(info.dtype).reshape(sizes)


def open_torch_bin(folder: Path) -> TorchBinSource:
    """Open pytorch_model.bin, or the shards of its index, in `folder`.

    Raises `CheckpointError` if torch is not installed, a file is missing or damaged, or one holds
    what the `weights_only` loader refuses.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as fault:
        raise CheckpointError(
            f"{folder}: reading {SINGLE_NAME} needs torch, which is not installed; install it "
            "(`pip install torch`) to convert this checkpoint"
        ) from fault
    if (folder / INDEX_NAME).exists(follow_symlinks=False):
        files = sorted(set(read_index(folder / INDEX_NAME, suffix=".bin").values()))
    else:
        files = [SINGLE_NAME]
    return TorchBinSource(folder, torch, {file: _load(torch, folder / file) for file in files})


def _load(torch: ModuleType, path: Path) -> Mapping[str, Any]:
    regular_file_size(path)
    try:
        # Files of before torch 1.6 are no zip archives and cannot be mapped.
        state = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as fault:
        raise CheckpointError(
            f"{path}: torch's weights_only loader refuses this file; it is damaged or holds "
            f"more than tensors ({str(fault)[:200]})"
        ) from fault
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path}: expected a dictionary of named tensors")
    return state


def _infos(path: Path, torch: ModuleType, state: Mapping[str, Any]) -> Iterator[TensorInfo]:
    for name, tensor in state.items():
        where = f"{path}: {printable_name(name)}"
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise CheckpointError(f"{where}: expected a dense tensor, got {type(tensor).__name__}")
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in _DTYPES:
            raise CheckpointError(
                f"{where}: dtype {kind} is not known; known are {', '.join(_DTYPES)}"
            )
        yield TensorInfo(name, tuple(tensor.shape), _DTYPES[kind], path.name)
