"""A compiled program as bytes: how it lies on disk, and how it comes from another process."""

import pickle
from collections.abc import Sequence

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled

from jaxgen_checkpoints.mesh_layout import Device

UNREADABLE = (
    *(ValueError, TypeError, KeyError, AttributeError, ImportError),
    *(pickle.UnpicklingError, EOFError, jax.errors.JaxRuntimeError),
)
"""What `unpack` raises for bytes that are not a program, or not one that this runtime takes."""


def pack(program: Compiled) -> bytes:
    """The program and the trees of its arguments and results. ValueError or TypeError where its
    runtime cannot write it, PickleError where a tree cannot be.
    """
    return pickle.dumps(serialize_executable.serialize(program))


def unpack(data: bytes, devices: Sequence[Device]) -> Compiled:
    """The program on these devices. Runs code that `data` names: it must be from a friend."""
    payload, in_tree, out_tree = pickle.loads(data)
    return serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, backend=devices[0].client, execution_devices=list(devices)
    )
