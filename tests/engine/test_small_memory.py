"""Holes for small arrays: what is held between them lies on every device, and nothing else is."""

import gc
import weakref

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgen.engine.small_memory import PART_BYTES, PARTS, make_holes


def test_what_lies_between_holes_is_held_on_every_device(monkeypatch):
    made, put = [], jax.device_put

    def watched(*args):
        array = put(*args)
        made.append(weakref.ref(array))
        return array

    monkeypatch.setattr(jax, "device_put", watched)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    between = make_holes(NamedSharding(mesh, PartitionSpec()))
    gc.collect()
    # A part before each that is held, and none behind the last, where free memory begins.
    assert [array() is not None for array in made] == [False, True] * PARTS
    assert len(between) == PARTS
    for array in between:
        assert array.nbytes == PART_BYTES
        assert array.devices() == set(mesh.devices.flat)
