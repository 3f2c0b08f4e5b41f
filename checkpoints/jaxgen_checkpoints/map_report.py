"""What is wrong with a whole checkpoint, told at once, without repeating it for every layer."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from jaxgen_checkpoints.container import LayerContainer
from jaxgen_checkpoints.dim import Dim
from jaxgen_checkpoints.names import layer_pattern, nearest, ranges
from jaxgen_checkpoints.source import printable_name

MAX_LINES = 40
"""Problems that one message lists; more are counted."""


class MapReport:
    """Collects what mapping a checkpoint finds; `error` and `warning` turn it into messages."""

    def __init__(
        self,
        description: str,
        prefixes: Sequence[str],
        layers: Sequence[LayerContainer],
        rest: LayerContainer | None,
    ) -> None:
        self._description = description
        self._prefixes = list(prefixes)
        self._layers = layers
        self._rest = rest
        self._layers_seen: set[int] = set()
        self._refused: list[tuple[str, str]] = []
        self._missing_layers: dict[int, int] = {}
        self._unused: list[str] = []
        self._off: dict[str, tuple[str, ...]] = {}
        self._beyond: dict[int, list[str]] = defaultdict(list)
        self._beginnings: dict[str, str] = {}

    def saw_layer(self, prefix: str, index: int) -> None:
        """The checkpoint holds a tensor of this layer."""
        if prefix not in self._prefixes or not self._layers_seen:
            self._prefixes.insert(0, prefix)
        self._layers_seen.add(index)

    def respelled(self, here: str, there: str) -> None:
        """Names that begin with `here` begin with `there` in this checkpoint."""
        self._beginnings[here] = there

    def beyond(self, name: str, index: int) -> None:
        """A tensor of a layer that the config does not know."""
        self._beyond[index].append(name)

    def unused(self, name: str) -> None:
        """A tensor that no rule knows."""
        self._unused.append(name)

    def switched_off(self, name: str, attributes: tuple[str, ...]) -> None:
        """A tensor of parameters that the config has switched off."""
        self._off[name] = attributes

    def refused(self, name: str, why: str) -> None:
        """A tensor that cannot be used as it is."""
        self._refused.append((name, why))

    def inspect(self) -> None:
        """Look for missing and for wrong tensors, after all have been handed to the containers."""
        prefix = self._prefixes[0] if self._prefixes else ""
        for index, layer in enumerate(self._layers):
            missing = layer.missing()
            total = len({source for source, *_ in layer.sources()})
            if missing and len(missing) == total:
                self._missing_layers[index] = total
                continue
            self._note_missing(f"{prefix}.{index}.", missing)
        if self._rest is not None:
            self._note_missing("", self._rest.missing())
        for container in (*self._layers, *([self._rest] if self._rest else [])):
            self._refused.extend((p.tensor, p.text) for p in container.problems())

    def error(self, *, strict: bool = False) -> str | None:
        """All that is wrong in one message; None where nothing is."""
        lines = [*self._layer_lines(), *self._grouped(self._refused)]
        if strict:
            lines += self._unused_lines()
        return self._message("the tensors do not fit the model", lines)

    def warning(self) -> str | None:
        """All that is left unused in one message; None where nothing is."""
        return self._message("not all tensors are used", list(self._unused_lines()))

    def _message(self, what: str, lines: Sequence[str]) -> str | None:
        if not lines:
            return None
        head = f"{self._description}: {what}"
        if len(lines) == 1:
            return f"{head}: {lines[0]}"
        shown = [*lines[:MAX_LINES]]
        if len(lines) > MAX_LINES:
            shown.append(f"and {len(lines) - MAX_LINES} more")
        return "\n  - ".join([f"{head}, {len(lines)} problems:", *shown])

    def _note_missing(self, start: str, missing: dict[str, str]) -> None:
        for source, hint in missing.items():
            name = self._as_stored(start + source)
            near = nearest(name, self._unused)
            why = "missing"
            if near is not None:
                why += f"; is {printable_name(near)!r}, which nothing uses, meant?"
            self._refused.append((name, f"{why}; {hint}" if hint else why))

    def _as_stored(self, name: str) -> str:
        for here, there in self._beginnings.items():
            if name.startswith(here):
                return there + name.removeprefix(here)
        return name

    def _layer_lines(self) -> Iterator[str]:
        if not self._missing_layers:
            return
        absent = list(self._missing_layers)
        each = ranges(sorted(set(self._missing_layers.values())))
        which = "all" if len(absent) == 1 else "each layer's"
        yield (
            f"{self._prefixes[0]}.{ranges(absent)}: {which} {each} tensors missing: "
            f"{self._config_says()}, the checkpoint holds {len(self._layers_seen)}"
        )

    def _unused_lines(self) -> Iterator[str]:
        for index, names in sorted(self._beyond.items()):
            yield (
                f"{self._prefixes[0]}.{index}: {len(names)} tensors of a layer too many: "
                f"{self._config_says()}, the checkpoint holds {len(self._layers_seen)}"
            )
        off = [(n, f"not used, because {' and '.join(a)} is false") for n, a in self._off.items()]
        yield from self._grouped(off)
        known = {self._as_stored(source) for source, *_ in self._sources()}
        unused = []
        for name in self._unused:
            match = self._local(name)
            near = nearest(match[1] if match else name, known)
            hint = f"; the nearest name that is known is {near!r}" if near else ""
            unused.append((name, f"not used{hint}"))
        yield from self._grouped(unused)

    def _sources(self) -> Iterator[tuple[str, ...]]:
        # Layers of one kind know the same names: one of each kind is enough.
        kinds = {type(layer): layer for layer in self._layers}
        for container in (*kinds.values(), *([self._rest] if self._rest else [])):
            for source, *_ in container.sources():
                yield (source,)

    def _grouped(self, problems: Sequence[tuple[str, str]]) -> Iterator[str]:
        """One line for the same problem in many layers."""
        groups: dict[tuple[str, str], list[tuple[str, int | None]]] = defaultdict(list)
        for name, why in problems:
            local = self._local(name)
            index, rest = local if local else (None, name)
            plain = why if index is None else why.replace(f".{index}.", ".*.")
            groups[rest, plain].append((f"{printable_name(name)}: {why}", index))
        for members in groups.values():
            text, _ = members[0]
            others = [index for _, index in members[1:] if index is not None]
            plural = "s" if len(others) > 1 else ""
            yield f"{text} (likewise in layer{plural} {ranges(others)})" if others else text

    def _local(self, name: str) -> tuple[int, str] | None:
        for prefix in self._prefixes:
            if match := layer_pattern(prefix).fullmatch(name):
                return int(match.group(1)), match.group(2)
        return None

    def _config_says(self) -> str:
        count = getattr(self._layers[0].model, "num_layers", None) if self._layers else None
        field = count.formula if isinstance(count, Dim) else "num_hidden_layers"
        return f"config says {field}={len(self._layers)}"
