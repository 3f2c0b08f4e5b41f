"""What modules are built over: loaded arrays, or the shapes that stand for them when planning."""

from typing import Any

type Leaf = Any
"""An array or a jax.ShapeDtypeStruct."""
