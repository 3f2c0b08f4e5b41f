"""The parameters of one layer (or of all outside the layers), and where their tensors come from.

A subclass is a page of declarations: annotated parameters and a PARAM_MAPPING, checked when the
class is made.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self

from jaxgen_checkpoints.annotations import own_annotations
from jaxgen_checkpoints.errors import CheckpointError, MappingError
from jaxgen_checkpoints.expectations import Problem
from jaxgen_checkpoints.lazy import LazyTensor
from jaxgen_checkpoints.mapping_rules import Rule, Target, make_rules, override, parse_mapping
from jaxgen_checkpoints.mesh_layout import MeshLayout
from jaxgen_checkpoints.model_shape import ModelShape
from jaxgen_checkpoints.parameter import Parameter
from jaxgen_checkpoints.weight import Weight


@dataclass(frozen=True, slots=True)
class PresentIf:
    """Marks a parameter that a model has only where one of its attributes is true."""

    attribute: str


def present_if(attribute: str) -> Any:  # noqa: ANN401 (stands where a Parameter is annotated)
    """Declare an optional parameter: `qkv_bias: UnfusedQKVBias = present_if("qkv_bias")`.

    It exists exactly where `getattr(model, attribute)` is true.
    """
    return PresentIf(attribute)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a source tensor goes. No targets: all that it feeds is switched off, see `off`."""

    targets: tuple[Target, ...]
    index: int | None
    off: tuple[str, ...]


class LayerContainer:
    """Annotated parameters, and PARAM_MAPPING from source names to `parameter.dependency`.

    A child inherits both and overrides a rule by its source or by its target. A class with
    parameters and no mapping is a base for others and cannot be instantiated.
    """

    PARAM_MAPPING: ClassVar[Mapping[str, str | tuple[str, ...]]] = MappingProxyType({})

    _types: ClassVar[Mapping[str, type[Parameter]]] = MappingProxyType({})
    _optional: ClassVar[Mapping[str, PresentIf]] = MappingProxyType({})
    _mapping: ClassVar[Mapping[str, tuple[Target, ...]]] = MappingProxyType({})
    _rules: ClassVar[tuple[Rule, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own_types = {
            name: kind
            for name, kind in own_annotations(cls).items()
            if isinstance(kind, type) and issubclass(kind, Parameter)
        }
        own_optional = {n: v for n, v in vars(cls).items() if isinstance(v, PresentIf)}
        bases = [base for base in reversed(cls.__mro__[1:]) if issubclass(base, LayerContainer)]
        types: dict[str, type[Parameter]] = {}
        optional: dict[str, PresentIf] = {}
        mapping: dict[str, tuple[Target, ...]] = {}
        for base in bases:
            types |= base._types
            optional |= base._optional
            mapping = override(mapping, base._mapping, {})
        for name in own_types:
            if hasattr(LayerContainer, name):
                raise MappingError(f"{cls.__name__}.{name}: a parameter cannot have this name")
            optional.pop(name, None)
        replaced = {n: (types[n], kind) for n, kind in own_types.items() if n in types}
        cls._types = MappingProxyType({**types, **own_types})
        for name in own_optional:
            if name not in cls._types:
                raise MappingError(f"{cls.__name__}.{name} is optional but not annotated")
        cls._optional = MappingProxyType({**optional, **own_optional})
        own_mapping = parse_mapping(cls.__name__, vars(cls).get("PARAM_MAPPING", {}))
        cls._mapping = MappingProxyType(override(mapping, own_mapping, replaced))
        if cls._mapping:
            cls._rules = make_rules(cls.__name__, cls._mapping, cls._types)

    def __init__(self, model: ModelShape) -> None:
        """Make the empty parameters that `model` has."""
        if self._types and not self._rules:
            raise MappingError(
                f"{type(self).__name__} has parameters but no PARAM_MAPPING; derive from it"
            )
        self.model = model
        self._off = {name: why for name, why in self._optional.items() if not self._present(why)}
        self._parameters = {
            name: kind(model, name) for name, kind in self._types.items() if name not in self._off
        }
        self._injected: dict[str, LazyTensor] = {}
        self._weights: dict[str, Weight] = {}
        for name in self._types:
            setattr(self, name, self._parameters.get(name))

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The parameters that this model has, by attribute name."""
        return MappingProxyType(self._parameters)

    def fresh(self) -> Self:
        """An empty container for the same model."""
        return type(self)(self.model)

    def find(self, name: str) -> Destination | None:
        """Where the source tensor `name` goes; None where no rule knows it.

        An exact source beats patterns. Raises `MappingError` when more than one pattern matches.
        """
        exact = [rule for rule in self._rules if rule.pattern is None and rule.source == name]
        hits = exact or [rule for rule in self._rules if rule.match(name)]
        if not hits:
            return None
        if len(hits) > 1:
            raise MappingError(
                f"{type(self).__name__}: {name!r} matches more than one source: "
                f"{[rule.source for rule in hits]}"
            )
        rule = hits[0]
        match = rule.match(name)
        index = int(match.group(1)) if match is not None and rule.is_list else None
        present = tuple(target for target in rule.targets if target[0] in self._parameters)
        off = tuple(self._off[t[0]].attribute for t in rule.targets if t[0] in self._off)
        return Destination(present, index, off)

    def set_dependency(self, name: str, tensor: LazyTensor) -> None:
        """Hand a source tensor, named as in PARAM_MAPPING, to every dependency that it feeds."""
        destination = self.find(name)
        if destination is None:
            raise CheckpointError(f"{type(self).__name__} has no rule for tensor {name!r}")
        if not destination.targets:
            raise CheckpointError(
                f"tensor {name!r} is not wanted: {', '.join(destination.off)} is false"
            )
        for parameter, dependency in destination.targets:
            self._parameters[parameter].set(dependency, tensor, destination.index)

    def direct_injection(self, parameter: str, tensor: LazyTensor) -> None:
        """Give a parameter its finished, canonical tensor instead of its dependencies."""
        if parameter not in self._parameters:
            raise CheckpointError(
                f"{type(self).__name__} has no parameter {parameter!r}; "
                f"it has {list(self._parameters)}"
            )
        shape = self._parameters[parameter].canonical_shape(self.model)
        if tensor.shape != shape:
            raise CheckpointError(
                f"parameter {parameter!r}: found shape {list(tensor.shape)}, expected {list(shape)}"
            )
        self._injected[parameter] = tensor

    @property
    def is_populated(self) -> bool:
        """Whether every parameter has all its dependencies, or its finished tensor."""
        return all(n in self._injected or p.is_populated for n, p in self._parameters.items())

    @property
    def is_initialized(self) -> bool:
        """Whether `finalize` has described every weight."""
        return self._weights.keys() == self._parameters.keys()

    def sources(self) -> Iterator[tuple[str, str, str, int | None]]:
        """Yield (source, parameter, dependency, index) of all that the present parameters need."""
        rule_of = {target: rule for rule in self._rules for target in rule.targets}
        for name, parameter in self._parameters.items():
            for dependency, index in type(parameter)(self.model, name).missing():
                yield rule_of[name, dependency].name_of(index), name, dependency, index

    def missing(self) -> dict[str, str]:
        """Sources (names or patterns) still to be set, each with its parameter's hint."""
        unset = {
            (name, *place)
            for name, parameter in self._parameters.items()
            if name not in self._injected
            for place in parameter.missing()
        }
        return {
            source: self._parameters[name].hint
            for source, name, dependency, index in self.sources()
            if (name, dependency, index) in unset
        }

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the tensors that have been set."""
        seen = set()
        for parameter in self._parameters.values():
            for problem in parameter.problems(self.model):
                if problem not in seen:
                    seen.add(problem)
                    yield problem

    def finalize(self, mesh: MeshLayout) -> dict[str, Weight]:
        """Describe every weight on this mesh. Raises `CheckpointError` if something is missing."""
        self._weights = {
            name: parameter.finalize(self.model, mesh)
            if name not in self._injected
            else parameter.place(self._injected[name], self.model, mesh)
            for name, parameter in self._parameters.items()
        }
        return dict(self._weights)

    def _present(self, condition: PresentIf) -> bool:
        if not hasattr(self.model, condition.attribute):
            raise MappingError(
                f"{type(self).__name__} asks {type(self.model).__name__} for "
                f"{condition.attribute!r}, which it has not got"
            )
        return bool(getattr(self.model, condition.attribute))
