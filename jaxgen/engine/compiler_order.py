"""What a process needs to know to lower a model's forwards as the process that asks would."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxgen.engine.model import Model, TreeDef
from jaxgen.engine.program_keys import Forward, Sizes
from jaxgen.engine.program_store import SETTINGS
from jaxgen_checkpoints.mesh_layout import MeshLayout, Rules, make_mesh
from jaxgen_models.policy import InferencePolicy


@dataclass(frozen=True, slots=True)
class Target:
    """The device that programs are for: what kernels ask JAX about it."""

    platform: str
    device_kind: str
    compute_capability: str
    core_count: int


@dataclass(frozen=True, slots=True)
class Request:
    """One forward to be lowered."""

    key: Forward
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Answer:
    """A lowered forward, packed, and the warnings that came with it."""

    data: bytes
    warnings: tuple[tuple[str, type[Warning]], ...]


@dataclass(frozen=True, slots=True)
class Order:
    """A model with nothing on any device. leaves: shape, dtype and mesh axes of each.

    rules: of the layout, on a mesh of these sizes.
    """

    policy: InferencePolicy
    graph: nnx.GraphDef
    tree: TreeDef
    leaves: tuple[tuple[tuple[int, ...], np.dtype, PartitionSpec], ...]
    dtype: np.dtype
    mesh: Mapping[str, int]
    rules: Rules
    target: Target
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, model: Model) -> "Order":
        """For a model in this process, on its mesh, under this process's settings of JAX."""
        device = model.mesh.devices.flat[0]
        return cls(
            model.policy,
            model.graph,
            model.tree,
            tuple((leaf.shape, leaf.dtype, leaf.sharding.spec) for leaf in model.leaves),
            model.dtype,
            dict(model.mesh.shape),
            dict(model.layout.rules),
            Target(
                device.platform,
                device.device_kind,
                getattr(device, "compute_capability", ""),
                getattr(device, "core_count", 0),
            ),
            {name: getattr(jax.config, name) for name in SETTINGS},
        )

    def model(self) -> Model:
        """The same over shapes, on as many devices as this process has been given for it."""
        shape = self.mesh
        mesh = make_mesh(data=shape["data"], expert=shape["expert"], tensor=shape["tensor"])
        leaves = tuple(
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for shape, dtype, spec in self.leaves
        )
        policy = self.policy
        layout = MeshLayout(mesh, self.rules)
        return Model(policy.config, policy, layout, self.graph, self.tree, leaves, self.dtype)
