"""A dependency that is many tensors, counted by the model: one per expert."""

from collections.abc import Iterator
from typing import ClassVar

from jaxgen_checkpoints.dim import formula
from jaxgen_checkpoints.errors import CheckpointError, MappingError
from jaxgen_checkpoints.lazy import LazyTensor


class ParameterList:
    """As many tensors as `getattr(model, count_attr)` says, each set once by its index.

    Subclass it with a `count_attr` and annotate a Parameter's dependency with the subclass;
    `ParamList("num_experts")` makes such a subclass in place.
    """

    count_attr: ClassVar[str] = ""

    def __init__(self, model: object, name: str) -> None:
        if not self.count_attr:
            raise MappingError(f"{type(self).__name__} has no count_attr: what does it count by?")
        count = getattr(model, self.count_attr, None)
        if not isinstance(count, int):
            raise MappingError(
                f"{name}: expected an int {self.count_attr!r} on {type(model).__name__}, "
                f"got {count!r}"
            )
        self._name = name
        self._count = count
        self._items: dict[int, LazyTensor] = {}

    def __len__(self) -> int:
        return int(self._count)

    def __iter__(self) -> Iterator[LazyTensor]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> LazyTensor:
        if index not in self._items:
            raise CheckpointError(f"{self._name}[{index}] has not been set")
        return self._items[index]

    def __setitem__(self, index: int, tensor: LazyTensor) -> None:
        if not 0 <= index < len(self):
            raise CheckpointError(
                f"{self._name}[{index}], from {tensor.source_names}, is out of range: "
                f"{formula(self._count)} is {len(self)}"
            )
        if index in self._items:
            raise CheckpointError(
                f"{self._name}[{index}] is set twice: by {self._items[index].source_names} "
                f"and by {tensor.source_names}"
            )
        self._items[index] = tensor

    @property
    def missing(self) -> list[int]:
        """Indices that have not been set."""
        return [index for index in range(len(self)) if index not in self._items]

    def set_items(self) -> Iterator[LazyTensor]:
        """The tensors that have been set, in index order."""
        return (self._items[index] for index in sorted(self._items))


def ParamList(count_attr: str) -> type[ParameterList]:  # noqa: N802 (reads as a type)
    """Make a ParameterList counted by `count_attr`: `experts: ParamList("num_experts")`."""
    return type(f"ParamList_{count_attr}", (ParameterList,), {"count_attr": count_attr})
