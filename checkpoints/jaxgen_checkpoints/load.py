"""From described weights to arrays on the devices: each shard is read from its own byte ranges.

The host holds a shard or two at a time, never a whole model.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxgen_checkpoints.errors import CheckpointWarning
from jaxgen_checkpoints.finite import all_finite, explain_non_finite
from jaxgen_checkpoints.mesh_layout import Device, MeshLayout
from jaxgen_checkpoints.source import slice_bounds
from jaxgen_checkpoints.weight import Weight

type Tree = dict[str, Any]
"""{"layers": [{attribute: leaf}], attribute: leaf}."""

type Progress = Callable[[int], object]
"""Called with the number of bytes that have just been placed."""


def abstract(described: Tree, mesh: MeshLayout, dtype: DTypeLike) -> Tree:
    """The tree of `jax.ShapeDtypeStruct`s, with shardings, that `load` would fill."""
    return _map(
        lambda weight: jax.ShapeDtypeStruct(
            weight.shape, weight.loaded_dtype(dtype), sharding=mesh.sharding(weight.axes)
        ),
        described,
    )


def load(
    described: Tree,
    mesh: MeshLayout,
    dtype: DTypeLike,
    progress: Progress | None = None,
    *,
    check: bool = True,
) -> Tree:
    """Read every weight onto the devices of this process, cast to `dtype` on the host.

    With `check`, values that are not finite (NaN, infinite, too large for `dtype`) give one
    `CheckpointWarning` that names their tensors.
    """
    bad: list[str] = []
    in_flight: list[jax.Array] = []

    def place(weight: Weight) -> jax.Array:
        sharding, kind = mesh.sharding(weight.axes), weight.loaded_dtype(dtype)
        arrays, finite = [], True
        for index, devices in _shards(weight, sharding):
            with np.errstate(over="ignore"):
                values = weight.placed().read(index).astype(kind, copy=False)
            finite = finite and (not check or all_finite(values))
            placed = [jax.device_put(values, device) for device in devices]
            if progress is not None:
                progress(values.nbytes)
            arrays += placed
            # Transfers run behind: while one shard is copied the next is read, no further ahead.
            jax.block_until_ready(in_flight)
            in_flight[:] = placed
        if not finite:
            bad.extend(explain_non_finite(weight, kind))
        return jax.make_array_from_single_device_arrays(weight.shape, sharding, arrays)

    loaded = jax.block_until_ready(_map(place, described))
    if bad:
        warnings.warn(
            "weights that are not finite make every answer meaningless: " + "; ".join(bad),
            CheckpointWarning,
            stacklevel=2,
        )
    return loaded


def bytes_to_load(described: Tree, mesh: MeshLayout, dtype: DTypeLike) -> int:
    """How many bytes `load` will place, copies on several devices counted once."""
    weights = jax.tree.leaves(described, is_leaf=_is_weight)
    return sum(
        int(np.prod([part.stop - part.start for part in index]))
        * weight.loaded_dtype(dtype).itemsize
        for weight in weights
        for index, _ in _shards(weight, mesh.sharding(weight.axes))
    )


def _shards(
    weight: Weight, sharding: NamedSharding
) -> Iterator[tuple[tuple[slice, ...], list[Device]]]:
    """Each slice of the weight that this process holds, with all the devices that hold it."""
    holders: dict[tuple[tuple[int, int], ...], list[Device]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(weight.shape).items():
        holders[slice_bounds("weight", weight.shape, index or ())].append(device)
    for bounds, devices in holders.items():
        yield tuple(slice(start, stop) for start, stop in bounds), devices


def _is_weight(node: object) -> bool:
    return isinstance(node, Weight)


def _map(fn: Callable[[Weight], object], described: Tree) -> Tree:
    return jax.tree.map(fn, described, is_leaf=_is_weight)
