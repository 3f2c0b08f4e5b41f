"""A learned vector for every position, the same on every device."""

from collections.abc import Mapping
from typing import Protocol, cast

from jaxgen_checkpoints.lazy import LazyTensor
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter import Parameter, Tensor


class PositionShape(ModelShape, Protocol):
    """Sizes of a model with a table of positions."""

    @property
    def position_rows(self) -> int:
        """Rows of the table, rows that no position uses included."""
        ...


class PositionEmbedding(Parameter):
    """[position_rows, model]."""

    weight: Tensor
    axes = (None, None)

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        # Only a model that has a table of positions has a container with this parameter.
        return {"weight": (cast(PositionShape, model).position_rows, model.model_dim)}

    def canonical(self, model: ModelShape) -> LazyTensor:
        return self.weight
