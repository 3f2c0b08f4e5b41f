"""Machines by name: `v5p:4x4x4`, `h200:8`, `cpu:4` become devices that programs are compiled for.

TPU and GPU devices are descriptions only; their compilers come with libtpu and the CUDA plugin.
"""

import importlib.util
import os
import re
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from jaxgen.compile_cache import jax_cache_left_out
from jaxgen.plan.chips import CHIPS, Chip
from jaxgen_checkpoints.errors import RefusedInput
from jaxgen_checkpoints.mesh_layout import Device
from pallas_kernels.dispatch import lowering_for

# A size of zero would end the process inside libtpu; nobody has five digits of chips in a row.
_NAME = re.compile(r"(?P<kind>[a-z0-9]+):(?P<shape>[1-9]\d{0,3}(x[1-9]\d{0,3})*)")

_CARDS_OF_A_HOST = 8

# What XLA's GPU compiler wants to know of a card that is not there.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 149250113536 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
  runtime_version: "13.0.0" driver_version: "13.0.0" name: "NVIDIA H200"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""

_NEEDS = {
    "tpu": {"libtpu": "libtpu"},
    "cuda": {
        "jax_cuda13_plugin": "jax-cuda13-plugin",
        "jax_plugins.xla_cuda13": "jax-cuda13-pjrt",
    },
}
"""Platform -> importable module -> the package that brings it."""


@dataclass(frozen=True, slots=True)
class Topology:
    """A machine. chip: None for a CPU, whose memory and speed nobody states."""

    name: str
    devices: Sequence[Device]
    chip: Chip | None

    @property
    def platform(self) -> str:
        """As `pallas_kernels.dispatch` names it."""
        return "cpu" if self.chip is None else self.chip.platform

    @contextmanager
    def compiling(self) -> Generator[None]:
        """Within it programs are lowered and compiled for this machine.

        JAX's cache is left out where devices are descriptions: it keeps such programs and then
        cannot read them, since there is nothing to load them on.
        """
        described = self.chip is not None
        with lowering_for(self.platform), jax_cache_left_out() if described else nullcontext():
            yield


def parse_topology(name: str) -> Topology:
    """The machine of that name; RefusedInput if there is none, or its compiler is not installed."""
    found = _NAME.fullmatch(name)
    kind = found["kind"] if found else ""
    if found is None or (kind != "cpu" and kind not in CHIPS):
        raise RefusedInput(
            f"topology {name!r}: expected {', '.join([*CHIPS, 'cpu'])}, a colon and a shape, "
            "such as v5e:2x2, v5p:4x4x4, h200:8 or cpu:4"
        )
    chip = CHIPS.get(kind)
    counted = chip is None or chip.platform == "cuda"
    if counted and ("x" in found["shape"] or (chip and int(found["shape"]) > _CARDS_OF_A_HOST)):
        raise RefusedInput(
            f"topology {name!r}: devices of one host are counted, as in h200:8 or cpu:4; a host "
            f"has at most {_CARDS_OF_A_HOST} cards"
        )
    if chip is None:
        return Topology(name, _host_devices(name, int(found["shape"])), None)
    _need_compiler(name, chip.platform)
    return Topology(name, _described(name, found["shape"], chip), chip)


def host_devices(name: str) -> int:
    """CPU devices that a name asks for; 0 where it is another machine's name, or nobody's."""
    found = _NAME.fullmatch(name)
    return int(found["shape"]) if found and found["kind"] == "cpu" and not found[3] else 0


def _host_devices(name: str, count: int) -> list[Device]:
    devices = jax.devices("cpu")
    if count > len(devices):
        raise RefusedInput(
            f"topology {name!r}: this process has {len(devices)} CPU devices; start it with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return devices[:count]


def _need_compiler(name: str, platform: str) -> None:
    needed = _NEEDS[platform]
    missing = [package for module, package in needed.items() if not _importable(module)]
    if missing:
        # Without their dependencies, which are what only a machine with the card needs.
        raise RefusedInput(
            f"topology {name!r}: its compiler is not installed; pip install --no-deps "
            f"{' '.join(missing)}"
        )
    if platform == "cuda" and not (shutil.which("ptxas") or _importable("nvidia.cu13")):
        raise RefusedInput(
            f"topology {name!r}: NVIDIA's assembler is not installed: ptxas of a CUDA 13 toolkit "
            "on the PATH, or pip install nvidia-cuda-nvcc"
        )


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def _described(name: str, shape: str, chip: Chip) -> Sequence[Device]:
    if chip.platform == "cuda":
        # It would look for CUDA's libraries, which a machine without a card need not have.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        described = topologies.get_topology_desc(
            "h200", platform="cuda", target_config=_H200, topology=f"1x1x{shape}"
        )
        return described.devices
    # libtpu would look for the machine it runs on; there is none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # it locks out other compilers
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    try:
        return topologies.get_topology_desc(name, platform="tpu").devices
    except Exception as error:  # libtpu raises its own RuntimeErrors, of several kinds
        raise RefusedInput(f"topology {name!r}: libtpu knows no such machine: {error}") from error
