"""A forward that one process has lowered and another compiles: what travels between the two.

The functions that travel take and give flat arrays, so that no kind of tree needs to be known to
`jax.export`; the trees go along.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import jax
from jax.export import DisabledSafetyCheck
from jax.sharding import Mesh
from jax.stages import Lowered, Wrapped

from jaxgen.engine.step import jit_forward

# Sent and read by the same version of everything, they need no promise to stay as they are.
_KERNELS = [DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")]


def pack(forward: Wrapped, arguments: Sequence[Any], platform: str) -> bytes:
    """Traces and lowers a forward for a platform. arguments: shapes with shardings."""
    leaves, tree = jax.tree.flatten(tuple(arguments))
    trees = []

    def flat(*leaves: Any) -> list[Any]:  # noqa: ANN401
        results, out_tree = jax.tree.flatten(forward(*tree.unflatten(leaves)))
        trees.append(out_tree)
        return results

    exported = jax.export.export(jax.jit(flat), platforms=[platform], disabled_checks=_KERNELS)
    lowered = exported(*leaves)
    return pickle.dumps((bytes(lowered.serialize()), trees[-1]))


def unpack(data: bytes, arguments: Sequence[Any], mesh: Mesh) -> Lowered:
    """What lowering the forward here would have given, donated pages and all."""
    serialized, out_tree = pickle.loads(data)
    exported = jax.export.deserialize(bytearray(serialized))

    def forward(*arguments: Any) -> Any:  # noqa: ANN401
        return out_tree.unflatten(exported.call(*jax.tree.leaves(arguments)))

    return jit_forward(forward, mesh).lower(*arguments)
