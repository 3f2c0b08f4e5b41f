"""A loaded model as the step sees it: a static graph, flat leaves, and where each leaf lies.

NNX objects are split once, here. Walking them in a hot loop costs milliseconds; a tuple of arrays
does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxgen_checkpoints.mesh_layout import MeshLayout
from jaxgen_models.cache import LayerCache
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder import Decoder
from jaxgen_models.policy import InferencePolicy

type TreeDef = Any
"""What jax.tree.flatten gives beside the leaves."""

type Leaf = Any
"""An array, or the jax.ShapeDtypeStruct that stands for it when a step is only compiled."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a step is traced from. `leaves` are arrays, or shapes with shardings for planning.

    dtype: of the activations and of the KV cache.
    """

    config: DecoderConfig
    policy: InferencePolicy
    layout: MeshLayout
    graph: nnx.GraphDef
    tree: TreeDef
    leaves: tuple[Leaf, ...]
    dtype: np.dtype

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.layout.mesh

    @property
    def leaf_specs(self) -> tuple[PartitionSpec, ...]:
        """For each leaf the mesh axes that its dimensions are divided over."""
        return tuple(leaf.sharding.spec for leaf in self.leaves)

    @property
    def tensor_shards(self) -> int:
        """Devices that share each layer."""
        return self.mesh.shape["tensor"]

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """What each layer keeps of the past."""
        return self.policy.layer_caches(self.tensor_shards)

    def bytes_per_device(self) -> int:
        """Bytes of the weights that one device holds."""
        return sum(
            leaf.dtype.itemsize * _size(leaf.sharding.shard_shape(leaf.shape))
            for leaf in self.leaves
        )

    def merge(self, leaves: tuple[Leaf, ...]) -> Decoder:
        """The modules over the given leaves; called while tracing, where leaves are local
        shards.
        """
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))


def build_model(policy: InferencePolicy, weights: Mapping[str, Any], layout: MeshLayout) -> Model:
    """Splits the policy's modules over `weights`: loaded arrays, or shapes with shardings."""
    graph, state = nnx.split(policy.build_model(weights, layout.mesh.shape["tensor"]))
    leaves, tree = jax.tree.flatten(state)
    dtype = np.dtype(weights["embed"].dtype)
    return Model(policy.config, policy, layout, graph, tree, tuple(leaves), dtype)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
