"""What a machine knows of its deployments: one small file each, under the user's own folder."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxgen_checkpoints.errors import RefusedInput

FOLDER_VARIABLE = "JAXGEN_CACHE_PATH"


class DeploymentNotFound(RefusedInput):
    """No deployment of that name runs on this machine."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One name, and the process that serves it at `url`: alone, or in front of its replicas."""

    name: str
    model: str
    url: str
    pid: int


def folder() -> Path:
    """Where records and logs are: $JAXGEN_CACHE_PATH, or ~/.cache/jaxgen/deployments."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "jaxgen" / "deployments"


def log_file(name: str) -> Path:
    """What the server and its replicas write."""
    return folder() / f"{_safe(name)}.log"


def write_record(deployment: Deployment) -> None:
    """Makes the deployment known; a record of the same name is replaced."""
    path = _record(deployment.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(deployment), indent=1))
    partial.replace(path)


def read_record(name: str) -> Deployment:
    """The deployment of that name; DeploymentNotFound lists those that there are."""
    try:
        held = json.loads(_record(name).read_text())
    except FileNotFoundError:
        known = ", ".join(sorted(path.stem for path in folder().glob("*.json"))) or "none"
        raise DeploymentNotFound(
            f"there is no deployment {name!r} on this machine; there are: {known}"
        ) from None
    return Deployment(**held)


def forget(name: str) -> None:
    """Removes the record, if there is one."""
    _record(name).unlink(missing_ok=True)


def _record(name: str) -> Path:
    return folder() / f"{_safe(name)}.json"


def _safe(name: str) -> str:
    """The name as one file name: never a path."""
    kept = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).strip(".")
    if not kept:
        raise RefusedInput(f"deployment_name {name!r} has no letter or digit")
    return kept
