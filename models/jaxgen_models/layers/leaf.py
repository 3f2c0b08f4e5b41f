"""What modules are built over: loaded arrays, or the shapes that stand for them when planning."""

from typing import Any

type Leaf = Any
"""An array or a jax.ShapeDtypeStruct, or None where a docstring says so: beartype, which checks
models under test, refuses `Leaf | None`, and `Self`."""
