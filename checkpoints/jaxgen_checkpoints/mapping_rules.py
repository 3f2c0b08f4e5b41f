"""The rules of a PARAM_MAPPING: which source tensor feeds which dependency, checked as a whole.

A rule is `"self_attn.q_proj.weight": "qkv.q"`, or a tuple of targets. `*` in a source stands
for one path segment; for a list it is the index.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jaxgen_checkpoints.errors import MappingError
from jaxgen_checkpoints.parameter import Parameter
from jaxgen_checkpoints.parameter_list import ParameterList

type Target = tuple[str, str]
"""(parameter, dependency)."""

type ParameterTypes = Mapping[str, type[Parameter]]

_SEGMENT = r"[^.]+"
_INDEX = r"0|[1-9][0-9]*"


@dataclass(frozen=True, slots=True)
class Rule:
    """One source (a name or a pattern) and what it feeds."""

    source: str
    targets: tuple[Target, ...]
    is_list: bool
    pattern: re.Pattern[str] | None

    def match(self, name: str) -> re.Match[str] | None:
        """Match a whole name against the pattern."""
        return None if self.pattern is None else self.pattern.fullmatch(name)

    def name_of(self, index: int | None) -> str:
        """The source of item `index` of a list; the source itself where there is no index."""
        return self.source if index is None else self.source.replace("*", str(index))


def parse_mapping(owner: str, mapping: Mapping[str, str | tuple[str, ...]]) -> dict[str, tuple]:
    """Turn `param.dep` strings into targets. Raises `MappingError` for another form."""
    parsed = {}
    for source, written in mapping.items():
        targets = (written,) if isinstance(written, str) else tuple(written)
        parts = [tuple(target.split(".")) for target in targets]
        for target, part in zip(targets, parts, strict=True):
            if len(part) != 2 or not all(part):
                raise MappingError(
                    f"{owner}: {source!r} is mapped to {target!r}; expected 'parameter.dependency'"
                )
        if not parts:
            raise MappingError(f"{owner}: {source!r} is mapped to nothing; list it as unmapped")
        parsed[source] = tuple(parts)
    _refuse_twice(owner, ((s, t) for s, targets in parsed.items() for t in targets))
    return parsed


def override(
    inherited: Mapping[str, tuple[Target, ...]],
    own: Mapping[str, tuple[Target, ...]],
    replaced: Mapping[str, tuple[type[Parameter], type[Parameter]]],
) -> dict[str, tuple[Target, ...]]:
    """Merge a child's mapping over its parent's: the child wins, by source and by target.

    replaced: parameters that the child annotates anew, with their (old, new) type; rules for
    dependencies that the new type has not got, or has of another kind, fall away with the old one.
    """
    taken = {target for targets in own.values() for target in targets}

    def stays(target: Target) -> bool:
        old, new = replaced.get(target[0], (None, None))
        gone = old is not None and not _same_kind(old, new, target[1])
        return target not in taken and not gone

    merged = {}
    for source, targets in inherited.items():
        kept = tuple(target for target in targets if stays(target))
        if kept and source not in own:
            merged[source] = kept
    return {**merged, **own}


def make_rules(
    owner: str, mapping: Mapping[str, tuple[Target, ...]], parameters: ParameterTypes
) -> tuple[Rule, ...]:
    """Check a whole mapping against the parameters it feeds; every fault is a `MappingError`."""
    _refuse_twice(owner, ((s, t) for s, targets in mapping.items() for t in targets))
    rules = tuple(_make_rule(owner, s, targets, parameters) for s, targets in mapping.items())
    fed = {target for rule in rules for target in rule.targets}
    unfed = [
        f"{parameter}.{dependency}"
        for parameter, kind in parameters.items()
        for dependency in kind.dependencies
        if (parameter, dependency) not in fed
    ]
    if unfed:
        raise MappingError(f"{owner}: no source is mapped to {', '.join(unfed)}")
    return rules


def pattern_of(source: str, star: str = _SEGMENT) -> re.Pattern[str]:
    """Compile a source with `*` (one segment) and `**` (any number of them); dots are literal."""
    meaning = {"**": ".+", "*": f"({star})"}
    parts = re.split(r"(\*\*|\*)", source)
    return re.compile("".join(meaning.get(part, re.escape(part)) for part in parts))


def _make_rule(
    owner: str, source: str, targets: tuple[Target, ...], parameters: ParameterTypes
) -> Rule:
    kinds = []
    for parameter, dependency in targets:
        if parameter not in parameters:
            raise MappingError(
                f"{owner}: {source!r} is mapped to parameter {parameter!r}, "
                f"which is not one of {list(parameters)}"
            )
        dependencies = parameters[parameter].dependencies
        if dependency not in dependencies:
            raise MappingError(
                f"{owner}: {source!r} is mapped to {parameter}.{dependency}; "
                f"{parameters[parameter].__name__} has {list(dependencies)}"
            )
        kinds.append(issubclass(dependencies[dependency], ParameterList))
    if len(set(kinds)) > 1:
        raise MappingError(f"{owner}: {source!r} is mapped to a list and to a tensor in one rule")
    is_list, stars = kinds[0], source.count("*")
    if is_list and stars != 1:
        raise MappingError(
            f"{owner}: {source!r} is mapped to a list, so it must hold exactly one '*' "
            f"(the index); it holds {stars}"
        )
    pattern = pattern_of(source, _INDEX if is_list else _SEGMENT) if stars else None
    return Rule(source, targets, is_list, pattern)


def _same_kind(old: type[Parameter], new: type[Parameter] | None, dependency: str) -> bool:
    if new is None or dependency not in new.dependencies:
        return False
    return all(
        issubclass(kind.dependencies.get(dependency, object), ParameterList)
        == issubclass(new.dependencies[dependency], ParameterList)
        for kind in (old, new)
    )


def _refuse_twice(owner: str, pairs: Iterable[tuple[str, Target]] | Iterator) -> None:
    source_of: dict[Target, str] = {}
    for source, target in pairs:
        if target in source_of:
            raise MappingError(
                f"{owner}: {'.'.join(target)} is mapped twice, from {source_of[target]!r} "
                f"and from {source!r}"
            )
        source_of[target] = source
