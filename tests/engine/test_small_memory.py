"""Holes for small arrays: what is held between them lies on every device."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgen.engine.small_memory import PART_BYTES, PARTS, make_holes


def test_what_lies_between_holes_is_held_on_every_device():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    between = make_holes(NamedSharding(mesh, PartitionSpec()))
    assert len(between) == PARTS
    for array in between:
        assert array.nbytes == PART_BYTES
        assert array.devices() == set(mesh.devices.flat)
