"""Typed access to the metadata of a GGUF file, with errors that name the file and the key."""

from pathlib import Path

import numpy as np

from jaxgen_checkpoints.errors import ConfigError
from jaxgen_checkpoints.readers.gguf_header import GGUFHeader, MetadataValue


class GGUFMetadata:
    """The metadata of one file; `key` is the architecture that its own keys begin with."""

    def __init__(self, path: Path, header: GGUFHeader) -> None:
        self.path = path
        self._values = header.metadata
        self.key = self._text("general.architecture")

    def find(self, name: str) -> MetadataValue | None:
        """The value under `{architecture}.{name}`, or None."""
        return self._values.get(f"{self.key}.{name}")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; a list with one number per layer only if they are all equal."""
        value = self.find(name)
        if isinstance(value, list) and len(set(map(repr, value))) == 1:
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"{self.path}: expected a positive integer under metadata key {self.key}.{name}, "
                f"got {value!r:.80}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A float32 as the shortest decimal that means it: 1e-05, not 9.99999974e-06."""
        value = self.find(name)
        if value is None and default is not None:
            return default
        if type(value) is int:
            return float(value)
        if not isinstance(value, float) or not np.isfinite(value):
            raise ConfigError(
                f"{self.path}: expected a number under metadata key {self.key}.{name}, "
                f"got {value!r:.80}"
            )
        return float(str(np.float32(value)))

    def _text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str):
            raise ConfigError(
                f"{self.path}: expected a text under metadata key {key}, got {value!r:.80}"
            )
        return value
