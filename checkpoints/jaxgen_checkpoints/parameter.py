"""A weight of the model, declared: which tensors it depends on, and what is made of them.

A subclass annotates its dependencies (`q: Tensor`, `up: ParamList("num_experts")`), says their
shapes (`expected`) and describes the result (`canonical`, `axes`). Everything else follows.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, NoReturn, Self

import numpy as np

from jaxgen_checkpoints.annotations import own_annotations
from jaxgen_checkpoints.errors import CheckpointError, MappingError
from jaxgen_checkpoints.expectations import Problem, check_tensor, placeholder
from jaxgen_checkpoints.heads import NOBODY
from jaxgen_checkpoints.lazy import LazyTensor
from jaxgen_checkpoints.mesh_layout import MeshLayout
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter_list import ParameterList
from jaxgen_checkpoints.source import printable_name
from jaxgen_checkpoints.weight import Weight

Tensor = LazyTensor
"""What a dependency of one tensor is annotated with."""


class Parameter:
    """One weight of the model and the tensors it is made of.

    `axes` names the logical axes of the result. `hint` is added where its tensors are missing.
    `kept` is the type that the weight is loaded in whatever the others are cast to.
    Setting a dependency twice, or a list as a whole, is refused. Nothing here changes once all
    dependencies are set: `finalize` is pure.
    """

    axes: ClassVar[tuple[str | None, ...]] = ()
    hint: ClassVar[str] = ""
    kept: ClassVar[np.dtype | None] = None
    dependencies: ClassVar[Mapping[str, type]] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {
            name: kind
            for name, kind in own_annotations(cls).items()
            if isinstance(kind, type) and issubclass(kind, LazyTensor | ParameterList)
        }
        for name in own:
            if hasattr(Parameter, name):
                raise MappingError(f"{cls.__name__}.{name}: a dependency cannot have this name")
        inherited = {
            name: kind
            for base in reversed(cls.__mro__[1:])
            if issubclass(base, Parameter)
            for name, kind in base.dependencies.items()
        }
        cls.dependencies = MappingProxyType({**inherited, **own})

    def __init__(self, model: ModelShape, name: str = "") -> None:
        """Make an empty parameter; `model` says how long its lists are, `name` is for messages."""
        self._name = name or type(self).__name__
        for dependency, kind in self.dependencies.items():
            if issubclass(kind, ParameterList):
                self.__dict__[dependency] = kind(model, f"{self._name}.{dependency}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.dependencies:
            if not isinstance(value, LazyTensor):
                raise MappingError(f"{self._name}.{name}: expected a LazyTensor, got {value!r}")
            self.set(name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> NoReturn:
        if name in self.dependencies:
            raise CheckpointError(f"{self._name}.{name} has not been set")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def set(self, dependency: str, tensor: LazyTensor, index: int | None = None) -> None:
        """Set a dependency, or item `index` of a list; a second time is refused, naming both."""
        kind = self.dependencies.get(dependency)
        if kind is None:
            raise MappingError(
                f"{self._name} has no dependency {dependency!r}; it has {list(self.dependencies)}"
            )
        if issubclass(kind, ParameterList):
            if index is None:
                raise MappingError(
                    f"{self._name}.{dependency} is a list: set its items, not the whole"
                )
            self.__dict__[dependency][index] = tensor
            return
        if index is not None:
            raise MappingError(f"{self._name}.{dependency} is one tensor, not a list")
        if dependency in self.__dict__:
            first = getattr(self, dependency).source_names
            raise CheckpointError(
                f"{self._name}.{dependency} is set twice: by {first} and by {tensor.source_names}"
            )
        self.__dict__[dependency] = tensor

    def missing(self) -> list[tuple[str, int | None]]:
        """(dependency, index in a list or None) of everything that has not been set."""
        result: list[tuple[str, int | None]] = []
        for name, kind in self.dependencies.items():
            if issubclass(kind, ParameterList):
                result.extend((name, index) for index in self.__dict__[name].missing)
            elif name not in self.__dict__:
                result.append((name, None))
        return result

    @property
    def is_populated(self) -> bool:
        """Whether every dependency has been set."""
        return not self.missing()

    def expected(self, model: ModelShape) -> Mapping[str, tuple[int, ...]]:
        """Shape of each dependency (of each item of a list), in Dims, which explain themselves."""
        raise NotImplementedError(f"{type(self).__name__} does not say what shapes it expects")

    def canonical(self, model: ModelShape) -> LazyTensor:
        """The result on one device, without padding, described from the dependencies."""
        raise NotImplementedError(f"{type(self).__name__} does not say what is made of its tensors")

    def placement(self, model: ModelShape, mesh: MeshLayout) -> Mapping[int, np.ndarray]:
        """Gather indices per axis for this mesh, see `Weight`. Default: zeros fill divided axes."""
        result = {}
        for axis, (logical, size) in enumerate(
            zip(self.axes, self.canonical_shape(model), strict=True)
        ):
            short = -size % mesh.shards(logical)
            if short:
                result[axis] = np.concatenate([np.arange(size), np.full(short, NOBODY)])
        return result

    def finalize(self, model: ModelShape, mesh: MeshLayout) -> Weight:
        """Describe the weight on this mesh; `CheckpointError` for missing or wrong tensors."""
        if missing := self.missing():
            raise CheckpointError(f"{self._name} is incomplete: {missing} not set")
        if problems := list(self.problems(model)):
            raise CheckpointError(
                "; ".join(f"{printable_name(p.tensor)}: {p.text}" for p in problems)
            )
        return self.place(self.canonical(model), model, mesh)

    def place(self, tensor: LazyTensor, model: ModelShape, mesh: MeshLayout) -> Weight:
        """Lay a canonical tensor, wherever it comes from, on this mesh."""
        return Weight(tensor, self.axes, self.placement(model, mesh), self.kept)

    def problems(self, model: ModelShape) -> Iterator[Problem]:
        """What is wrong with the tensors that have been set: shape or dtype."""
        expected = self.expected(model)
        for name in self.dependencies:
            value = self.__dict__.get(name)
            tensors = value.set_items() if isinstance(value, ParameterList) else [value]
            for tensor in tensors:
                if tensor is not None:
                    yield from check_tensor(tensor, expected[name])

    def canonical_shape(self, model: ModelShape) -> tuple[int, ...]:
        """Shape of `canonical`, without needing any tensor."""
        return self.blank(model).canonical(model).shape

    def blank(self, model: ModelShape) -> Self:
        """The same parameter with every dependency described by its expected shape, unreadable."""
        twin = type(self)(model, self._name)
        for name, index in twin.missing():
            twin.set(name, placeholder(name, twin.expected(model)[name]), index)
        return twin
