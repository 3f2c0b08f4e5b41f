"""The header of a GGUF file: metadata and tensor directory, each length checked before use.

The gguf package's own reader makes an array object per token (seconds for a vocabulary) and follows
counts beyond the end of the file, so the header is parsed here, with the package's types and block
sizes.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.readers.file_slices import regular_file_size
from jaxgen_checkpoints.source import printable_name

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_FIXED_BYTES = 24
_MAX_DIMENSIONS = 4
_MAX_ARRAY = 1 << 24

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}


type MetadataValue = str | int | float | bool | list[MetadataValue]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies: `begin` counts from the start of the file, `shape` has rows first."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata by key, tensors by the file's own names."""

    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and check the header of the GGUF file at `path`. Raises `CheckpointError`."""
    size = regular_file_size(path)
    if size < _FIXED_BYTES:
        raise CheckpointError(
            f"{path}: expected a GGUF file, got {size} bytes, too few for a header"
        )
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return _Parser(path, data).header()


class _Parser:
    """A position in the header that never passes the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._bytes(4) != _MAGIC:
            raise CheckpointError(
                f"{self._path}: not a GGUF file: expected it to begin with {_MAGIC!r}"
            )
        version = self._number("<I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path}: GGUF version {version} is not known (big-endian files are not); "
                f"expected one of {_VERSIONS}"
            )
        tensor_count, key_count = self._number("<Q"), self._number("<Q")
        metadata: dict[str, MetadataValue] = {}
        for _ in range(key_count):
            key = self._string("a metadata key")
            if key in metadata:
                raise CheckpointError(
                    f"{self._path}: metadata key {printable_name(key)} stands twice"
                )
            metadata[key] = self._value(key, self._number("<I"))
        entries = [self._entry() for _ in range(tensor_count)]
        return GGUFHeader(metadata, self._placed(entries, metadata))

    def _placed(
        self,
        entries: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]],
        metadata: Mapping[str, MetadataValue],
    ) -> dict[str, GGUFTensor]:
        """Turn offsets into positions in the file: aligned, inside it, no two in one place."""
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self._path}: general.alignment must be a power of two, got {alignment!r:.80}"
            )
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset in entries:
            where = f"{self._path}: tensor {printable_name(name)}"
            if name in tensors:
                raise CheckpointError(f"{where} stands twice in the file")
            if offset % alignment:
                raise CheckpointError(f"{where}: offset {offset} is not a multiple of {alignment}")
            begin = start + offset
            end = begin + _stored_bytes(where, kind, shape)
            if end > len(self._data):
                raise CheckpointError(
                    f"{where}: reaches to byte {end}, but the file has only {len(self._data)}; "
                    "the download may be incomplete"
                )
            tensors[name] = GGUFTensor(kind, shape, begin, end)
        position, before = start, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
            if tensor.begin < position:
                raise CheckpointError(
                    f"{self._path}: tensors {printable_name(before)} and "
                    f"{printable_name(name)} share bytes; the file is damaged"
                )
            position, before = tensor.end, name
        return tensors

    def _entry(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._string("a tensor name")
        dimensions = self._number("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(
                f"{self._path}: tensor {printable_name(name)}: {dimensions} dimensions; "
                f"expected 1 to {_MAX_DIMENSIONS}"
            )
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        kind = self._number("<I")
        if kind not in GGMLQuantizationType:
            raise CheckpointError(
                f"{self._path}: tensor {printable_name(name)}: type number {kind} is not known"
            )
        return name, GGMLQuantizationType(kind), shape, self._number("<Q")

    def _value(self, key: str, kind: int) -> MetadataValue:
        if kind == GGUFValueType.STRING:
            return self._string(f"the value of {printable_name(key)}")
        if kind in _SCALARS:
            form = _SCALARS[GGUFValueType(kind)]
            return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        if kind == GGUFValueType.ARRAY:
            return self._array(key)
        raise CheckpointError(
            f"{self._path}: metadata key {printable_name(key)} has unknown type {kind}"
        )

    def _array(self, key: str) -> list:
        kind, count = self._number("<I"), self._number("<Q")
        if count > _MAX_ARRAY or kind == GGUFValueType.ARRAY:
            raise CheckpointError(
                f"{self._path}: metadata key {printable_name(key)}: expected a flat array "
                f"of at most {_MAX_ARRAY} entries, got {count} of type {kind}"
            )
        if kind not in _SCALARS:
            return [self._value(key, kind) for _ in range(count)]
        letter = _SCALARS[GGUFValueType(kind)][1]
        return list(
            struct.unpack(f"<{count}{letter}", self._bytes(count * struct.calcsize(letter)))
        )

    def _string(self, what: str) -> str:
        data = self._bytes(self._number("<Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as fault:
            raise CheckpointError(
                f"{self._path}: {what} is not UTF-8 text (before byte {self._at})"
            ) from fault

    def _number(self, form: str) -> int:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise CheckpointError(
                f"{self._path}: its header reaches to byte {end}, but the file has only "
                f"{len(self._data)} bytes; the download may be incomplete"
            )
        part = self._data[self._at : end]
        self._at = end
        return part


def _stored_bytes(where: str, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise CheckpointError(
            f"{where}: rows of {shape[-1]} elements are no multiple of the {block} elements of a "
            f"{kind.name} block"
        )
    return math.prod(shape) // block * block_bytes
