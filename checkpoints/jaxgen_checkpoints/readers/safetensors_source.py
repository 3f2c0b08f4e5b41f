"""A folder's safetensors files (one, or shards with an index) as one `TensorSource`."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxgen_checkpoints.errors import CheckpointError, CheckpointWarning
from jaxgen_checkpoints.readers.file_slices import read_box
from jaxgen_checkpoints.readers.safetensors_header import StoredTensor, read_header
from jaxgen_checkpoints.readers.shard_index import INDEX_NAME, read_index
from jaxgen_checkpoints.source import TensorInfo, printable_name, slice_bounds


class SafetensorsSource:
    """Tensors of one or several safetensors files; headers are read and checked at construction."""

    def __init__(
        self, folder: Path, files: tuple[str, ...], index: Mapping[str, str] | None = None
    ) -> None:
        """Open `files` of `folder`. `index` (tensor -> file) settles which of two copies is meant.

        Raises `CheckpointError` for a damaged file, a tensor that the index promises and no file
        holds, and a tensor in two files between which the index does not decide.
        """
        self._folder = folder
        headers = {file: read_header(folder / file).tensors for file in files}
        self._stored = _settle(folder, headers, index)
        self._infos = {
            name: TensorInfo(name, stored.shape, stored.dtype, file)
            for name, (file, stored) in self._stored.items()
        }
        count = "1 safetensors file" if len(files) == 1 else f"{len(files)} safetensors files"
        self.description = f"{count} in {folder}"

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, in the files' order."""
        return self._infos

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read `tensor[index]` from its byte range, in the stored dtype."""
        file, stored = self._stored[name]
        bounds = slice_bounds(name, stored.shape, index)
        return read_box(self._folder / file, stored.begin, stored.shape, stored.dtype, bounds)


def open_sharded(folder: Path) -> SafetensorsSource:
    """Open the shards that the index of `folder` names. Raises `CheckpointError`."""
    index = read_index(folder / INDEX_NAME)
    return SafetensorsSource(folder, tuple(sorted(set(index.values()))), index)


def _settle(
    folder: Path,
    headers: Mapping[str, Mapping[str, StoredTensor]],
    index: Mapping[str, str] | None,
) -> dict[str, tuple[str, StoredTensor]]:
    """Decide for each tensor from which file it is read; tell where files and index disagree."""
    holders: dict[str, list[str]] = {}
    for file, tensors in headers.items():
        for name in tensors:
            holders.setdefault(name, []).append(file)
    absent = [printable_name(name) for name in index or () if name not in holders]
    if absent:
        raise CheckpointError(
            f"{folder / INDEX_NAME}: names {len(absent)} tensors that no shard holds: "
            f"{', '.join(absent[:5])} (looked in {', '.join(headers)})"
        )
    return {
        name: (file := _holder(folder, name, files, index), headers[file][name])
        for name, files in holders.items()
    }


def _holder(folder: Path, name: str, files: list[str], index: Mapping[str, str] | None) -> str:
    shown = printable_name(name)
    if index is None:
        if len(files) > 1:
            raise CheckpointError(f"{folder}: tensor {shown} is in {' and '.join(files)}")
        return files[0]
    named = index.get(name)
    if named is not None and named in files:
        if len(files) == 1:
            return named
        _warn(
            f"{folder}: tensor {shown} is in {' and '.join(files)}; "
            f"using {named}, as the index says"
        )
        return named
    if len(files) > 1:
        raise CheckpointError(
            f"{folder}: tensor {shown} is in {' and '.join(files)}, and {INDEX_NAME} does not say "
            "which is meant"
        )
    told = "does not name it" if named is None else f"says {named}"
    _warn(f"{folder}: tensor {shown} was found in {files[0]}, although {INDEX_NAME} {told}")
    return files[0]


def _warn(message: str) -> None:
    warnings.warn(message, CheckpointWarning, stacklevel=2)
