"""A mapped model as numbers: each weight's sources, shapes, sharding and bytes, and the totals."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxgen.engine.build import Described
from jaxgen.engine.frame import DEFAULT_BLOCK_SIZE
from jaxgen.engine.memory import block_bytes
from jaxgen_checkpoints.weight import Weight


@dataclass(frozen=True, slots=True)
class WeightReport:
    """One weight. spec: for each axis of the placed shape the mesh axis, or axes, that divide it.

    stored: the types of its sources, as checkpoint files spell them.
    """

    layer: int | None
    attribute: str
    sources: tuple[str, ...]
    stored: tuple[str, ...]
    canonical_shape: tuple[int, ...]
    placed_shape: tuple[int, ...]
    spec: tuple[str | tuple[str, ...] | None, ...]
    bytes_per_device: int

    def likeness(self) -> tuple[object, ...]:
        """What is equal for weights that differ in their layer's number alone."""
        shapes = self.canonical_shape, self.placed_shape, self.spec
        return (self.attribute, len(self.sources), self.stored, *shapes)


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The whole model. Bytes are those of one device, KV bytes those of all layers together."""

    source: str
    reason: str
    dtype: str
    mesh: dict[str, int]
    parameters: int
    bytes_per_device: int
    kv_bytes_per_token: int
    weights: list[WeightReport]
    unused: list[str]

    def as_json(self) -> dict[str, Any]:
        """Field names and values."""
        return asdict(self)


def report_model(described: Described, dtype: str) -> ModelReport:
    """What `load_model(described, dtype)` would place, without reading a weight."""
    model = described.shapes(dtype)
    kind = described.loaded_dtype(dtype)
    weights = list(_weights(described, kind))
    used = {source for weight in weights for source in weight.sources}
    return ModelReport(
        source=described.checkpoint.source.description,
        reason=described.reason,
        dtype=kind.name,
        mesh=dict(described.layout.mesh.shape),
        parameters=sum(math.prod(weight.canonical_shape) for weight in weights),
        bytes_per_device=sum(weight.bytes_per_device for weight in weights),
        kv_bytes_per_token=sum(block_bytes(model, DEFAULT_BLOCK_SIZE)) // DEFAULT_BLOCK_SIZE,
        weights=weights,
        unused=[name for name in described.checkpoint.source.tensors() if name not in used],
    )


def _weights(described: Described, kind: np.dtype) -> Iterator[WeightReport]:
    for index, layer in enumerate(described.weights["layers"]):
        for attribute, weight in layer.items():
            yield _weight(described, kind, index, attribute, weight)
    for attribute, weight in described.weights.items():
        if attribute != "layers":
            yield _weight(described, kind, None, attribute, weight)


def _weight(
    described: Described, kind: np.dtype, layer: int | None, attribute: str, weight: Weight
) -> WeightReport:
    sharding = described.layout.sharding(weight.axes)
    shard = sharding.shard_shape(weight.shape)
    return WeightReport(
        layer=layer,
        attribute=attribute,
        sources=tuple(dict.fromkeys(leaf.info.name for leaf in weight.tensor.leaves())),
        stored=tuple(dict.fromkeys(leaf.info.dtype_name for leaf in weight.tensor.leaves())),
        canonical_shape=weight.tensor.shape,
        placed_shape=weight.shape,
        spec=tuple(sharding.spec),
        bytes_per_device=math.prod(shard) * kind.itemsize,
    )
