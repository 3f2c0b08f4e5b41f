"""The format of a converted snapshot, and reading one: canonical weights that no mesh has shaped.

A folder of safetensors shards with their index, whose tensor names are `layers.N.attribute` and
`attribute`, and one JSON file with all that is needed to build the model again. No pickle.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.json_file import read_json_object
from jaxgen_checkpoints.readers.safetensors_source import open_sharded
from jaxgen_checkpoints.source import TensorInfo, TensorSource

SNAPSHOT_FILE = "jaxgen_snapshot.json"
SNAPSHOT_FORMAT = "jaxgen snapshot"
SNAPSHOT_VERSION = 1

_FIELDS = {
    "policy": str,
    "config": dict,
    "generation_config": dict,
    "gguf_tokenizer": dict | None,
    "axes": dict,
}


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """A `TensorSource` whose tensors are finished weights, named by the containers' attributes.

    axes: the logical axes that each weight had when it was saved; a container that now describes
      others would misread it.
    """

    stored: TensorSource
    policy: str
    axes: Mapping[str, tuple[str | None, ...]]

    @property
    def description(self) -> str:
        """One line for people."""
        return f"snapshot of {self.policy}: {self.stored.description}"

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every weight by name."""
        return self.stored.tensors()

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read a slice of a weight."""
        return self.stored.read(name, index)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An opened snapshot: what its checkpoint said, and its weights, unread."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    gguf_tokenizer: dict[str, Any] | None
    source: SnapshotSource


def open_snapshot(folder: str | Path) -> Snapshot:
    """Open what `save_snapshot` wrote. Raises `CheckpointError` for anything else."""
    folder = Path(folder)
    path = folder / SNAPSHOT_FILE
    manifest = read_json_object(path)
    if manifest.get("format") != SNAPSHOT_FORMAT or manifest.get("version") != SNAPSHOT_VERSION:
        raise CheckpointError(
            f"{path}: expected {SNAPSHOT_FORMAT!r} version {SNAPSHOT_VERSION}, got "
            f"{manifest.get('format')!r} version {manifest.get('version')!r}; convert the "
            "checkpoint again with this version of jaxgen"
        )
    for field, kind in _FIELDS.items():
        if not isinstance(manifest.get(field), kind):
            raise CheckpointError(f"{path}: {field!r} is missing or of a wrong type")
    axes = {name: _today(names) for name, names in manifest["axes"].items()}
    return Snapshot(
        config=manifest["config"],
        generation_config=manifest["generation_config"],
        gguf_tokenizer=manifest["gguf_tokenizer"],
        source=SnapshotSource(open_sharded(folder), manifest["policy"], axes),
    )


def _today(axes: list[str | None]) -> tuple[str | None, ...]:
    """Axes by today's names: the hidden layer of an expert had that of any other once."""
    if "experts" not in axes:
        return tuple(axes)
    return tuple("expert_ffn" if axis == "ffn" else axis for axis in axes)
