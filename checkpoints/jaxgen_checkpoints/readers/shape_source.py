"""A checkpoint of which only the shapes are known: for planning and for random weights."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.source import TensorInfo


class ShapeSource:
    """Tensors by name and shape, without a byte behind them."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """shapes: what `ContainerMap.expected_tensors` says of a complete checkpoint."""
        self._infos = {
            name: TensorInfo(name, tuple(shape), np.dtype(np.float32), "the config alone")
            for name, shape in shapes.items()
        }
        self.description = f"the shapes of {len(self._infos)} tensors"

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._infos

    def read(self, name: str, index: tuple[slice, ...]) -> NoReturn:
        """Refused: there is nothing to read."""
        del index
        raise CheckpointError(f"{name} was described from a config; it has no values to read")
