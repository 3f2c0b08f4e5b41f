"""Weights nobody trained, made on the devices themselves: to measure speed without a checkpoint."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxgen_checkpoints.load import Tree
from jaxgen_checkpoints.mesh_layout import MeshLayout
from jaxgen_checkpoints.weight import Weight

_STANDARD_DEVIATION = 0.02


def random_weights(described: Tree, mesh: MeshLayout, dtype: DTypeLike, seed: int = 0) -> Tree:
    """The tree that `load` would give, of normal values with deviation 0.02; vectors are ones.

    Vectors are the weights of norms (and biases), whose size decides on the size of everything
    behind them. Every weight is random on all its elements, padding included: measure with it,
    compare nothing.
    """
    weights, tree = jax.tree.flatten(described, is_leaf=lambda node: isinstance(node, Weight))
    keys = jax.random.split(jax.random.key(seed), max(1, len(weights)))
    arrays = [
        _make(weight.shape, weight.loaded_dtype(dtype), mesh.sharding(weight.axes))(key)
        for weight, key in zip(weights, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


@cache
def _make(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.NamedSharding
) -> jax.stages.Wrapped:
    return jax.jit(partial(_values, shape=shape, dtype=dtype), out_shardings=sharding)


def _values(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return (jax.random.normal(key, shape, jnp.float32) * _STANDARD_DEVIATION).astype(dtype)
