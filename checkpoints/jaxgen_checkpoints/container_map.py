"""Where every tensor of a checkpoint goes: containers for the layers and one for all the rest.

`describe` maps a whole checkpoint before any of it is read (but for some rows of a tensor that is
stored twice), and reports everything that is wrong at once.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxgen_checkpoints.container import LayerContainer
from jaxgen_checkpoints.errors import CheckpointError, CheckpointWarning, MappingError
from jaxgen_checkpoints.lazy import LazyTensor, lazy
from jaxgen_checkpoints.map_report import MapReport
from jaxgen_checkpoints.mapping_rules import pattern_of
from jaxgen_checkpoints.mesh_layout import MeshLayout
from jaxgen_checkpoints.names import layer_pattern
from jaxgen_checkpoints.snapshot import SnapshotSource
from jaxgen_checkpoints.source import TensorSource
from jaxgen_checkpoints.tied_copies import is_copy


class ContainerMap:
    """Containers, the prefixes of the layers' tensors, and names that are left out on purpose."""

    def __init__(self) -> None:
        self._prefixes: tuple[str, ...] = ()
        self._layers: tuple[LayerContainer, ...] = ()
        self._rest: LayerContainer | None = None
        self._unmapped: tuple[re.Pattern[str], ...] = ()
        self._tied: dict[str, str] = {}
        self._beginnings: dict[str, str] = {}

    def set_transformer_params(
        self, prefixes: Sequence[str], containers: Sequence[LayerContainer]
    ) -> None:
        """Tensors named `PREFIX.N.rest`, for any of `prefixes`, go to `containers[N]` as `rest`."""
        self._prefixes = _strings("prefixes", prefixes)
        if not isinstance(containers, list | tuple) or not all(
            isinstance(container, LayerContainer) for container in containers
        ):
            raise MappingError(
                f"containers: expected a list with one LayerContainer a layer, got {containers!r}"
            )
        self._layers = tuple(containers)

    def set_non_transformer_params(self, container: LayerContainer) -> None:
        """Every other tensor goes to `container`, by its whole name."""
        if not isinstance(container, LayerContainer):
            raise MappingError(f"container: expected a LayerContainer, got {container!r}")
        if "layers" in container.parameters:
            raise MappingError("a parameter outside the layers cannot be named 'layers'")
        self._rest = container

    def set_unmapped_params(self, patterns: Sequence[str]) -> None:
        """Tensors to leave out without a word; `*` is one path segment, `**` any number of them."""
        self._unmapped = tuple(pattern_of(text) for text in _strings("patterns", patterns))

    def set_other_beginnings(self, beginnings: Mapping[str, str]) -> None:
        """How names begin in other files -> how they begin here: a name that nothing knows is taken
        for the one that begins so, where that is known. {"": "model."} is a file whose names all
        lack `model.`, as those of a model without its head do.
        """
        if not isinstance(beginnings, Mapping):
            raise MappingError(f"beginnings: expected a mapping, got {beginnings!r}")
        self._beginnings = dict(beginnings)

    def set_tied(self, copies: Mapping[str, str]) -> None:
        """Tied copy -> original. A copy is accepted and left out, and refused where it holds other
        values; it stands in for its original only where the checkpoint stores nothing but the copy.
        """
        if not isinstance(copies, Mapping):
            raise MappingError(f"copies: expected a mapping of copy to original, got {copies!r}")
        self._tied = dict(copies)

    def describe(
        self, source: TensorSource, mesh: MeshLayout, *, strict: bool = False
    ) -> dict[str, Any]:
        """Map every tensor of `source`: {"layers": [{attribute: Weight}], attribute: Weight}.

        Raises one `CheckpointError` with all that is missing, of a wrong shape or type, or mapped
        twice. Tensors that nothing uses give one `CheckpointWarning`; `strict` refuses them too.
        """
        layers = [layer.fresh() for layer in self._layers]
        rest = self._rest.fresh() if self._rest is not None else None
        report = MapReport(source.description, self._prefixes[:1], layers, rest)
        if isinstance(source, SnapshotSource):
            _inject(source, layers, rest, report)
        else:
            self._distribute(source, layers, rest, report)
            report.inspect()
        if error := report.error(strict=strict):
            raise CheckpointError(error)
        if warning := report.warning():
            warnings.warn(warning, CheckpointWarning, stacklevel=2)
        ends = rest.finalize(mesh) if rest is not None else {}
        return {"layers": [layer.finalize(mesh) for layer in layers], **ends}

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a complete checkpoint, under the first prefix.

        Sources that are patterns (other than lists) are left out: they have no one name.
        """
        expected = {}
        for start, container in self._containers():
            for source, parameter, dependency, _ in container.sources():
                shapes = container.parameters[parameter].expected(container.model)
                if "*" not in source:
                    expected[start + source] = tuple(int(size) for size in shapes[dependency])
        return expected

    def _containers(self) -> Iterator[tuple[str, LayerContainer]]:
        for index, layer in enumerate(self._layers):
            yield f"{self._prefixes[0]}.{index}.", layer
        if self._rest is not None:
            yield "", self._rest

    def _distribute(
        self,
        source: TensorSource,
        layers: Sequence[LayerContainer],
        rest: LayerContainer | None,
        report: MapReport,
    ) -> None:
        patterns = [
            (prefix, layer_pattern(prefix)) for prefix in sorted(self._prefixes, key=len)[::-1]
        ]
        whole = {name: self._whole_name(name, patterns, rest, report) for name in source.tensors()}
        infos = {whole[stored]: info for stored, info in source.tensors().items()}
        stands_in = {
            copy: original
            for copy, original in self._tied.items()
            if copy in infos and original not in infos
        }
        for stored, info in source.tensors().items():
            name = whole[stored]
            if self._is_unmapped(name):
                continue
            if name in self._tied and name not in stands_in:
                original = self._tied[name]
                if not is_copy(source, info, infos[original]):
                    report.refused(stored, _no_copy(infos[original].name))
                continue
            tensor, name = lazy(info, source), stands_in.get(name, name)
            for _, pattern in patterns:
                if match := pattern.fullmatch(name):
                    index, local = int(match.group(1)), match.group(2)
                    report.saw_layer(stored.removesuffix(f".{index}.{local}"), index)
                    if index < len(layers):
                        _route(stored, local, tensor, layers[index], report)
                    else:
                        report.beyond(stored, index)
                    break
            else:
                if rest is None:
                    report.unused(stored)
                else:
                    _route(stored, name, tensor, rest, report)

    def _is_unmapped(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in self._unmapped)

    def _whole_name(
        self,
        name: str,
        layers: Sequence[tuple[str, re.Pattern[str]]],
        rest: LayerContainer | None,
        report: MapReport,
    ) -> str:
        def known(candidate: str) -> bool:
            return (
                self._is_unmapped(candidate)
                or candidate in self._tied
                or any(pattern.fullmatch(candidate) for _, pattern in layers)
                or (rest is not None and rest.find(candidate) is not None)
            )

        if known(name):
            return name
        for there, here in self._beginnings.items():
            spelled = here + name.removeprefix(there)
            if name.startswith(there) and known(spelled):
                report.respelled(here, there)
                return spelled
        return name


def _no_copy(original: str) -> str:
    return (
        f"holds other values than {original}, to which the config ties it; set tie_word_embeddings "
        "to false if it is a head of its own, or leave it out of the file"
    )


def _route(
    name: str, local: str, tensor: LazyTensor, container: LayerContainer, report: MapReport
) -> None:
    try:
        destination = container.find(local)
        if destination is None:
            report.unused(name)
        elif not destination.targets:
            report.switched_off(name, destination.off)
        else:
            container.set_dependency(local, tensor)
    except (CheckpointError, MappingError) as error:
        report.refused(name, str(error))


def _inject(
    source: SnapshotSource,
    layers: Sequence[LayerContainer],
    rest: LayerContainer | None,
    report: MapReport,
) -> None:
    """Take canonical weights as they are: their names are the attributes of the containers."""
    tensors = dict(source.tensors())
    owners = [(f"layers.{index}.", layer) for index, layer in enumerate(layers)]
    owners += [("", rest)] if rest is not None else []
    for start, container in owners:
        for parameter in container.parameters:
            name = start + parameter
            info = tensors.pop(name, None)
            if info is None:
                report.refused(name, "missing from the snapshot")
                continue
            axes = container.parameters[parameter].axes
            if source.axes.get(name) != axes:
                report.refused(
                    name, f"was saved with axes {source.axes.get(name)}, expected {axes}"
                )
                continue
            try:
                container.direct_injection(parameter, lazy(info, source))
            except CheckpointError as error:
                report.refused(name, str(error))
    for name in tensors:
        report.refused(name, "is in the snapshot, but the model has no such weight")


def _strings(what: str, values: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise MappingError(f"{what}: expected a list of strings, got {values!r}")
    return tuple(values)
