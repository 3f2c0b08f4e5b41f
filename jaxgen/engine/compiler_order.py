"""What a process needs to know to compile a model's programs as the process that asks would."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
from flax import nnx
from jax.experimental.topologies import TopologyDescription
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgen.engine.model import Model, TreeDef
from jaxgen.engine.program_keys import ProgramKey, Sizes
from jaxgen.engine.program_store import SETTINGS
from jaxgen_checkpoints.mesh_layout import Device, MeshLayout, Rules
from jaxgen_models.policy import InferencePolicy


@dataclass(frozen=True, slots=True)
class Request:
    """One program to be compiled."""

    key: ProgramKey
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Answer:
    """A program as `executables.pack` gives it, and the warnings that came with it."""

    data: bytes
    warnings: tuple[tuple[str, type[Warning]], ...]


@dataclass(frozen=True, slots=True)
class Order:
    """A model with nothing on any device. leaves: shape, dtype and mesh axes of each.

    machine: the devices that there are, as their runtime describes them; None for CPUs. mesh: ids
    of those that the mesh has, by axis. rules: of the layout on it.
    """

    policy: InferencePolicy
    graph: nnx.GraphDef
    tree: TreeDef
    leaves: tuple[tuple[tuple[int, ...], np.dtype, PartitionSpec], ...]
    dtype: np.dtype
    machine: bytes | None
    mesh: np.ndarray
    axes: tuple[str, ...]
    rules: Rules
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, model: Model) -> Self:
        """For a model in this process, on its mesh, under this process's settings of JAX.

        JaxRuntimeError where the devices' runtime does not describe them.
        """
        mesh = model.mesh
        devices = list(mesh.devices.flat)
        on_cpu = devices[0].platform == "cpu"
        return cls(
            model.policy,
            model.graph,
            model.tree,
            tuple((leaf.shape, leaf.dtype, leaf.sharding.spec) for leaf in model.leaves),
            model.dtype,
            None if on_cpu else TopologyDescription(devices).serialize(),
            np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices),
            mesh.axis_names,
            dict(model.layout.rules),
            {name: getattr(jax.config, name) for name in SETTINGS},
        )

    def devices(self) -> Sequence[Device]:
        """Those of the machine: descriptions, for which can be compiled; CPUs as many as needed."""
        if self.machine is None:
            jax.config.update("jax_num_cpu_devices", int(self.mesh.max()) + 1)
            return jax.devices("cpu")
        jax.devices()  # makes JAX find the runtime that reads the description
        return TopologyDescription.deserialize(self.machine).devices

    def model(self, devices: Sequence[Device]) -> Model:
        """The same over shapes on these devices."""
        by_id = {device.id: device for device in devices}
        grid = np.vectorize(by_id.__getitem__, otypes=[object])(self.mesh)
        mesh = Mesh(grid, self.axes, axis_types=(AxisType.Auto,) * len(self.axes))
        leaves = tuple(
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for shape, dtype, spec in self.leaves
        )
        policy = self.policy
        layout = MeshLayout(mesh, self.rules)
        return Model(policy.config, policy, layout, self.graph, self.tree, leaves, self.dtype)
