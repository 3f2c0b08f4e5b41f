"""The header of a safetensors file, believed only after every statement in it has been checked.

The format: eight bytes of header length, a JSON object name -> {dtype, shape, data_offsets}, then
the data, every byte of which belongs to exactly one tensor.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxgen_checkpoints.errors import CheckpointError, CheckpointWarning
from jaxgen_checkpoints.json_file import parse_json_object
from jaxgen_checkpoints.readers.file_slices import read_range, regular_file_size
from jaxgen_checkpoints.source import DTYPE_NAMES, printable_name

MAX_HEADER_BYTES = 100_000_000
_PREFIX_BYTES = 8
_LARGEST_SIZE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `begin` is its first byte, counted from the start of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: every tensor in the file's own order, and the free-form metadata."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """Read and check the header of the safetensors file at `path`.

    Raises `CheckpointError` for anything that is not exactly as the format says. Warns
    (`CheckpointWarning`) of names that cannot be printed.
    """
    file_bytes = regular_file_size(path)
    if file_bytes < _PREFIX_BYTES:
        raise CheckpointError(
            f"{path}: expected a safetensors file, got {file_bytes} bytes, too few for a header; "
            "the download may be incomplete"
        )
    header_bytes = int.from_bytes(read_range(path, 0, _PREFIX_BYTES), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: its header claims {header_bytes} bytes, more than the format's limit of "
            f"{MAX_HEADER_BYTES}; not a safetensors file, or damaged"
        )
    if _PREFIX_BYTES + header_bytes > file_bytes:
        raise CheckpointError(
            f"{path}: its header claims {header_bytes} bytes, but the file has only {file_bytes}; "
            "the download may be incomplete"
        )
    fields = parse_json_object(
        read_range(path, _PREFIX_BYTES, header_bytes), f"{path}: safetensors header"
    )
    metadata = _checked_metadata(path, fields.pop("__metadata__", {}))
    start = _PREFIX_BYTES + header_bytes
    tensors = {name: _checked_tensor(path, name, entry, start) for name, entry in fields.items()}
    _check_cover(path, tensors, start, file_bytes)
    _warn_of_names(path, tensors)
    return Header(tensors, metadata)


def _checked_metadata(path: Path, metadata: object) -> dict[str, str]:
    if isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values()):
        return metadata
    raise CheckpointError(
        f"{path}: the header's __metadata__ must be an object of strings; the file is damaged"
    )


def _checked_tensor(path: Path, name: str, entry: object, start: int) -> StoredTensor:
    where = f"{path}: tensor {printable_name(name)}"
    if any(0xD800 <= ord(c) <= 0xDFFF for c in name):
        raise CheckpointError(f"{where}: its name is not valid Unicode text")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where}: expected an object with dtype, shape and data_offsets in the header"
        )
    dtype = DTYPE_NAMES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"{where}: dtype {entry['dtype']!r:.80} is not known; known are "
            f"{', '.join(DTYPE_NAMES)}"
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape):
        raise CheckpointError(f"{where}: shape {shape!r:.200} is not a list of sizes below 2**63")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: data_offsets {offsets!r:.200} are not two byte positions")
    begin, end = offsets
    if begin > end:
        raise CheckpointError(
            f"{where}: data_offsets {offsets} begin after they end; the file is damaged"
        )
    needed = math.prod(shape) * dtype.itemsize
    if needed != end - begin:
        raise CheckpointError(
            f"{where}: shape {shape} of {entry['dtype']} needs {needed} bytes, but its "
            f"data_offsets {offsets} span {end - begin}; the file is damaged"
        )
    return StoredTensor(dtype, tuple(shape), start + begin, start + end)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size <= _LARGEST_SIZE for size in value
    )


def _check_cover(
    path: Path, tensors: Mapping[str, StoredTensor], start: int, file_bytes: int
) -> None:
    """Every data byte must belong to one tensor: inside the file, no sharing, no holes, no rest."""
    described = max((tensor.end for tensor in tensors.values()), default=start)
    if described > file_bytes:
        name = next(name for name, tensor in tensors.items() if tensor.end > file_bytes)
        raise CheckpointError(
            f"{path}: its header describes {described} bytes, but the file has only {file_bytes}, "
            f"and tensor {printable_name(name)} reaches past the end; was the download cut short?"
        )
    position, before = start, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < position:
            raise CheckpointError(
                f"{path}: tensors {printable_name(before)} and {printable_name(name)} share bytes "
                f"{tensor.begin} to {min(position, tensor.end)}; the file is damaged"
            )
        if tensor.begin > position:
            raise CheckpointError(
                f"{path}: bytes {position} to {tensor.begin}, before tensor "
                f"{printable_name(name)}, belong to no tensor; the file is damaged"
            )
        position, before = tensor.end, name
    if position != file_bytes:
        raise CheckpointError(
            f"{path}: its header describes {position} bytes, but the file has {file_bytes}; "
            "the file is damaged"
        )


def _warn_of_names(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    strange = [printable_name(name) for name in tensors if not name.isprintable()]
    if strange:
        warnings.warn(
            f"{path}: {len(strange)} tensor names hold characters that cannot be printed: "
            f"{', '.join(strange[:3])}",
            CheckpointWarning,
            stacklevel=2,
        )
