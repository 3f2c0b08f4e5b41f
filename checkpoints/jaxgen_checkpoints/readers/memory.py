"""Arrays that are already in memory, a trained state for instance, as a `TensorSource`.

No file lies between training and inference; what is read is a slice of the live array.
"""

from collections.abc import Mapping

import jax
import numpy as np

from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.source import TensorInfo, printable_name, slice_bounds


class MemorySource:
    """Leaves of a pytree of numpy or JAX arrays, each named by its path joined with `.`."""

    def __init__(self, tree: object) -> None:
        """Take a flat or nested dict, an NNX state, Linen params, or any pytree with named paths.

        The last step into an NNX variable (`.value`) is not part of a name; random number generator
        keys are left out, since they are no weights. Raises `CheckpointError` for a leaf that is
        not an array and for two leaves of one name.
        """
        self._arrays: dict[str, np.ndarray | jax.Array] = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = ".".join(_step(key) for key in _without_box(path))
            if name in self._arrays:
                raise CheckpointError(f"two arrays are named {printable_name(name)}")
            if not isinstance(leaf, np.ndarray | jax.Array):
                raise CheckpointError(
                    f"{printable_name(name)}: expected a numpy or JAX array, got "
                    f"{type(leaf).__name__}"
                )
            if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                self._arrays[name] = leaf
        self._infos = {
            name: TensorInfo(name, tuple(array.shape), np.dtype(array.dtype), "memory")
            for name, array in self._arrays.items()
        }
        self.description = f"{len(self._arrays)} arrays in memory"

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every array by name, in the tree's order."""
        return self._infos

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Copy `array[index]` to the host, in the array's own dtype."""
        array = self._arrays[name]
        bounds = slice_bounds(name, array.shape, index)
        return np.array(array[tuple(slice(start, stop) for start, stop in bounds)])


def _without_box(path: tuple) -> tuple:
    boxed = path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value"
    return path[:-1] if boxed else path


def _step(key: object) -> str:
    match key:
        case jax.tree_util.DictKey() | jax.tree_util.FlattenedIndexKey():
            return str(key.key)
        case jax.tree_util.SequenceKey():
            return str(key.idx)
        case jax.tree_util.GetAttrKey():
            return key.name
    return str(key)
