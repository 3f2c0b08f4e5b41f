"""Measured choices by device kind: `tuned/<device kind>.json`, written by a tuner, read here.

A file holds, for each operation, what was measured to be best by the operation's own keys. Where
there is no file or no key, an operation falls back on its heuristic.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import jax


def tuned(operation: str, device_kind: str | None = None) -> Mapping[str, Any]:
    """What was stored for the operation; empty if nothing was.

    device_kind: as JAX names it, such as "NVIDIA H200"; None asks the first local device.
    """
    kind = jax.local_devices()[0].device_kind if device_kind is None else device_kind
    return MappingProxyType(_stored(kind).get(operation, {}))


def file_name(device_kind: str) -> str:
    """Of the file that holds a device kind's choices."""
    return device_kind.replace(" ", "_").replace("/", "_") + ".json"


@cache
def _stored(device_kind: str) -> dict[str, Any]:
    path = resources.files("pallas_kernels") / "tuned" / file_name(device_kind)
    return json.loads(path.read_text()) if path.is_file() else {}
