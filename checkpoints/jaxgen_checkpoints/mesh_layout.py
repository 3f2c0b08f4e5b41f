"""The one table that says which logical axis of a weight lies on which axis of the device mesh."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import jax
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgen_checkpoints.errors import MappingError, RefusedInput

type Device = jax.Device  # pyright: ignore[reportInvalidTypeForm] (JAX says it as a variable)

MESH_AXES = ("data", "expert", "tensor")

type Rules = Mapping[str, str | tuple[str, ...] | None]
"""Logical axis -> the mesh axis that divides it, or several, the slowest first, or none."""

DEFAULT_RULES: Rules = MappingProxyType(
    {
        "vocab": "tensor",
        "heads": "tensor",
        "kv_heads": "tensor",
        "ffn": "tensor",
        "experts": "expert",
        "expert_ffn": "tensor",
        "model": None,
        "head": None,
        "layers": None,
        "latent": None,
    }
)

WHOLE_EXPERTS: Rules = MappingProxyType(
    {**DEFAULT_RULES, "experts": ("expert", "tensor"), "expert_ffn": None}
)
"""Every device of a replica has experts of its own, each of them whole."""


def make_mesh(
    tensor: int = 1, expert: int = 1, data: int = 1, devices: Sequence[Device] | None = None
) -> Mesh:
    """Make a mesh of `data * expert * tensor` devices: the first of `devices`, or of all there are.

    The axes are Auto: shard_map says what happens on a shard, and outside it XLA propagates. Raises
    `RefusedInput` when there are not enough devices.
    """
    sizes = {"data": data, "expert": expert, "tensor": tensor}
    for name, size in sizes.items():
        if size < 1:
            raise RefusedInput(f"mesh axis {name!r}: expected a size of at least 1, got {size}")
    available = list(jax.devices() if devices is None else devices)
    needed = data * expert * tensor
    if needed > len(available):
        hint = ""
        if available and available[0].platform == "cpu":
            flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
            hint = f", or, to try it on a CPU, have this one counted as {needed}: {flag}"
        raise RefusedInput(
            f"a mesh of data={data}, expert={expert}, tensor={tensor} needs {needed} devices, "
            f"{len(available)} found; choose smaller sizes{hint}"
        )
    # A tensor axis may be shorter than an axis of the torus: 8 of a v5p:4x4x4, say.
    grid = create_device_mesh(
        tuple(sizes[name] for name in MESH_AXES),
        available[:needed],
        allow_split_physical_axes=True,
    )
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """A mesh and the rules that lay logical axes on it."""

    mesh: Mesh
    rules: Rules = field(default_factory=lambda: DEFAULT_RULES)

    def __post_init__(self) -> None:
        """Refuse rules that name an axis which the mesh lacks."""
        for logical in self.rules:
            for axis in self.mesh_axes(logical):
                if axis not in self.mesh.shape:
                    raise MappingError(
                        f"logical axis {logical!r} is laid on mesh axis {axis!r}; "
                        f"the mesh has {list(self.mesh.shape)}"
                    )

    def mesh_axes(self, logical: str | None) -> tuple[str, ...]:
        """The mesh axes that divide `logical`, the slowest first; none where it is whole."""
        if logical is None:
            return ()
        if logical not in self.rules:
            raise MappingError(
                f"logical axis {logical!r} is not known; expected one of {sorted(self.rules)}"
            )
        rule = self.rules[logical]
        if rule is None:
            return ()
        return (rule,) if isinstance(rule, str) else rule

    def shards(self, logical: str | None) -> int:
        """Into how many parts `logical` is divided."""
        return math.prod(self.mesh.shape[axis] for axis in self.mesh_axes(logical))

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """PartitionSpec of these logical axes; two of them on one mesh axis are refused."""
        owner: dict[str, str | None] = {}
        entries: list[str | tuple[str, ...] | None] = []
        for logical in axes:
            divided = self.mesh_axes(logical)
            entries.append(divided if len(divided) > 1 else next(iter(divided), None))
            for axis in divided:
                if axis in owner:
                    raise MappingError(
                        f"logical axes {owner[axis]!r} and {logical!r} of {tuple(axes)} both lie "
                        f"on mesh axis {axis!r}; a weight can be divided by it only once"
                    )
                owner[axis] = logical
        return PartitionSpec(*entries)

    def sharding(self, axes: Sequence[str | None]) -> NamedSharding:
        """Sharding of a weight with these logical axes."""
        return NamedSharding(self.mesh, self.spec(axes))
