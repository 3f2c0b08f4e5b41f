"""The one table that says which logical axis of a weight lies on which axis of the device mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import jax
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgen_checkpoints.errors import MappingError, RefusedInput

type Device = jax.Device  # pyright: ignore[reportInvalidTypeForm] (JAX says it as a variable)

MESH_AXES = ("data", "expert", "tensor")

DEFAULT_RULES: Mapping[str, str | None] = MappingProxyType(
    {
        "vocab": "tensor",
        "heads": "tensor",
        "kv_heads": "tensor",
        "ffn": "tensor",
        "experts": "expert",
        "model": None,
        "head": None,
        "layers": None,
        "latent": None,
    }
)


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
        raise RefusedInput(
            f"a mesh of data={data}, expert={expert}, tensor={tensor} needs {needed} devices, "
            f"{len(available)} found; choose smaller sizes"
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
    rules: Mapping[str, str | None] = field(default_factory=lambda: DEFAULT_RULES)

    def __post_init__(self) -> None:
        """Refuse rules that name an axis which the mesh lacks."""
        for logical, axis in self.rules.items():
            if axis is not None and axis not in self.mesh.shape:
                raise MappingError(
                    f"logical axis {logical!r} is laid on mesh axis {axis!r}; "
                    f"the mesh has {list(self.mesh.shape)}"
                )

    def mesh_axis(self, logical: str | None) -> str | None:
        """The mesh axis that holds `logical`; None where it is not divided."""
        if logical is None:
            return None
        if logical not in self.rules:
            raise MappingError(
                f"logical axis {logical!r} is not known; expected one of {sorted(self.rules)}"
            )
        return self.rules[logical]

    def shards(self, logical: str | None) -> int:
        """Into how many parts `logical` is divided."""
        axis = self.mesh_axis(logical)
        return 1 if axis is None else self.mesh.shape[axis]

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """PartitionSpec of these logical axes; two of them on one mesh axis are refused."""
        owner: dict[str, str] = {}
        entries: list[str | None] = []
        for logical in axes:
            axis = self.mesh_axis(logical)
            entries.append(axis)
            if axis is None or logical is None:
                continue
            if axis in owner:
                raise MappingError(
                    f"logical axes {owner[axis]!r} and {logical!r} of {tuple(axes)} both lie on "
                    f"mesh axis {axis!r}; a weight can be divided by it only once"
                )
            owner[axis] = logical
        return PartitionSpec(*entries)

    def sharding(self, axes: Sequence[str | None]) -> NamedSharding:
        """Sharding of a weight with these logical axes."""
        return NamedSharding(self.mesh, self.spec(axes))
