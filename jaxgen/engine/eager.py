"""A step for debugging: run op by op, on one device, where Python and its debugger can look.

`jax.shard_map` would compile every operation anew, so the mesh's axes are vmapped at size one:
collectives keep their meaning, and everything else is an ordinary operation on arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def on_one_device(local: Callable[..., Any], axis_names: Sequence[str]) -> Callable[..., Any]:
    """`local` as it runs on a mesh whose axes all have size one; op by op under `disable_jit`."""
    mapped = local
    for name in axis_names:
        mapped = _over_one(mapped, name)
    return mapped


def _over_one(local: Callable[..., Any], name: str) -> Callable[..., Any]:
    mapped = jax.vmap(local, in_axes=None, out_axes=0, axis_size=1, axis_name=name)
    return lambda *arguments: jax.tree.map(lambda leaf: leaf[0], mapped(*arguments))
