"""The format of a converted snapshot, and reading one: canonical weights that no mesh has shaped.

A folder of safetensors files, whose tensor names are `layers.N.attribute` and `attribute`, and
one JSON file with all that is needed to build the model again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxgen_checkpoints.source import TensorInfo, TensorSource

SNAPSHOT_FILE = "jaxgen_snapshot.json"
SNAPSHOT_VERSION = 1


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """A `TensorSource` whose tensors are finished weights, named by the containers' attributes."""

    stored: TensorSource
    policy: str

    @property
    def description(self) -> str:
        """One line for people."""
        return f"snapshot of {self.policy} ({self.stored.description})"

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every weight by name."""
        return self.stored.tensors()

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read a slice of a weight."""
        return self.stored.read(name, index)
