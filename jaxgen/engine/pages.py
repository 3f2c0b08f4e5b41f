"""The pages of all layers, each of the kind that the policy says: shapes, sharding and bytes."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxgen.engine.model import Model
from jaxgen_models.cache import LayerPages

type Pages = list[LayerPages]
"""One entry a layer."""


def page_specs(model: Model) -> Pages:
    """PartitionSpecs of every layer's pages."""
    return [cache.spec() for cache in model.caches]


def abstract_pages(model: Model, num_blocks: tuple[int, ...], block_size: int) -> Pages:
    """Shapes and shardings of every layer's pages. num_blocks: of each cache group."""

    def place(leaf: jax.ShapeDtypeStruct, spec: Any) -> jax.ShapeDtypeStruct:  # noqa: ANN401
        sharding = NamedSharding(model.mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return [
        jax.tree.map(
            place,
            cache.abstract(num_blocks[group], page_size=block_size, dtype=model.dtype),
            cache.spec(),
        )
        for cache, group in zip(model.caches, model.policy.layer_cache_groups, strict=True)
    ]


def block_bytes(model: Model, block_size: int) -> tuple[int, ...]:
    """Bytes that one block of each cache group takes on one device, all its layers together."""
    groups = model.policy.layer_cache_groups
    count = len(model.policy.cache_windows)
    sizes = [0] * count
    for group, pages in zip(groups, abstract_pages(model, (1,) * count, block_size), strict=True):
        for leaf in jax.tree.leaves(pages):
            shape = leaf.sharding.shard_shape(leaf.shape)
            sizes[group] += leaf.dtype.itemsize * math.prod(shape)
    return tuple(sizes)
