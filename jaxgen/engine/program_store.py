"""Compiled programs on disk, found again without tracing: a second start takes seconds.

JAX's own cache is keyed by the lowered program, and lowering the kernels of a model's steps takes
a minute. Here the key is what a program follows from: this project's sources, the versions of JAX
and of the device's runtime, its flags, the model's configuration, the mesh and what lies on which
axis of it, and every argument's shape. Programs of a policy that is not ours are not kept: its
source is not part of the key.
"""

import hashlib
import importlib.metadata
import logging
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled

import jaxgen_checkpoints
import jaxgen_models
import pallas_kernels
from jaxgen.engine.executables import UNREADABLE, unpack
from jaxgen.engine.model import Model
from jaxgen.engine.program_keys import Draw
from pallas_kernels.dispatch import prepare_loading

logger = logging.getLogger(__name__)

_ROOTS = (
    Path(__file__).parents[1],
    *(Path(package.__path__[0]) for package in (jaxgen_models, jaxgen_checkpoints, pallas_kernels)),
)
_CHECKSUM = 4
"""Bytes."""

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
SETTINGS = ("jax_default_matmul_precision", "jax_enable_x64", "jax_numpy_dtype_promotion")
"""Of JAX's, those that change what a program is."""


class ProgramStore:
    """The programs of one model on one machine.

    A file that cannot be read, or that this runtime refuses, is as good as none, and written anew.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        """folder: of all programs; whoever can write there can run code here, as with JAX's own."""
        self._folder = folder
        self._fingerprint = _fingerprint(model)
        # A draw sees logits and the sampler's state: models of one vocabulary share it.
        self._of_model = repr((type(model.policy).__qualname__, model.config))
        self._devices = list(model.mesh.devices.flat)
        prepare_loading(self._devices[0].platform)

    @staticmethod
    def serves(model: Model) -> bool:
        """Whether what the model's programs follow from is known."""
        package = type(model.policy).__module__.partition(".")[0]
        return package == jaxgen_models.__name__

    def read(self, key: object, arguments: Sequence[Any]) -> Compiled | None:
        """The program that was written under this key, for arguments of these shapes."""
        path = self._path(key, arguments)
        try:
            return unpack(_checked(path.read_bytes()), self._devices)
        except FileNotFoundError:
            return None
        except (OSError, *UNREADABLE) as error:
            logger.warning("%s cannot be used (%s): compiling anew", path, error)
        return None

    def write(self, key: object, arguments: Sequence[Any], program: bytes) -> None:
        """Keeps a program, as `executables.pack` gives it.

        A full or read-only disk costs the next start its speed, no more.
        """
        path = self._path(key, arguments)
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(_sealed(program))
            draft.replace(path)
        except OSError as error:
            logger.warning("%s cannot be written (%s)", path, error)
            with suppress(OSError):  # where there is no folder, there is no draft
                draft.unlink()

    def _path(self, key: object, arguments: Sequence[Any]) -> Path:
        shapes = [
            (leaf.shape, str(leaf.dtype), str(leaf.sharding.spec))
            for leaf in jax.tree.leaves(arguments)
        ]
        text = repr((key, shapes, jax.tree.structure(arguments)))
        of_model = "" if isinstance(key, Draw) else self._of_model
        name = hashlib.sha256((self._fingerprint + of_model + text).encode()).hexdigest()
        return self._folder / f"{name[:32]}.program"


def _sealed(data: bytes) -> bytes:
    """The data behind its checksum: what a runtime makes of damaged programs nobody can catch."""
    return zlib.crc32(data).to_bytes(_CHECKSUM) + data


def _checked(sealed: bytes) -> bytes:
    """What `_sealed` was given. ValueError if it is not what was written."""
    data = sealed[_CHECKSUM:]
    if zlib.crc32(data).to_bytes(_CHECKSUM) != sealed[:_CHECKSUM]:
        raise ValueError("the file is damaged")
    return data


def _fingerprint(model: Model) -> str:
    """Whatever a program follows from beside its key, its arguments and the model's config."""
    devices = model.mesh.devices
    backend = devices.flat[0].client
    known = (
        _sources(),
        [(name, importlib.metadata.version(name)) for name in ("jax", "jaxlib", "flax")],
        (backend.platform, backend.platform_version),
        [device.device_kind for device in jax.devices()],
        (dict(model.mesh.shape), [device.id for device in devices.flat]),
        sorted(model.layout.rules.items()),
        [(name, os.environ.get(name)) for name in _FLAGS],
        [(name, getattr(jax.config, name)) for name in SETTINGS],
    )
    return repr(known)


@cache
def _sources() -> str:
    """A digest of every file of the packages whose code is traced."""
    digest = hashlib.sha256()
    for root in _ROOTS:
        for path in sorted(root.rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(str(path.relative_to(root)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()
