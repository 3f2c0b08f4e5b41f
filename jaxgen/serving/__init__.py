"""Serving: one thread owns the engine, asyncio talks to it, HTTP talks to that.

Names are imported when they are first used: the engine alone needs no web framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxgen_checkpoints.errors import RefusedInput

if TYPE_CHECKING:
    from jaxgen.serving.app import create_app as create_app
    from jaxgen.serving.async_engine import AsyncEngine as AsyncEngine
    from jaxgen.serving.process import settle_process as settle_process
    from jaxgen.serving.replicas.fleet import Fleet as Fleet
    from jaxgen.serving.replicas.front import create_front as create_front
    from jaxgen.serving.server import (
        ListenSettings as ListenSettings,
        Server as Server,
        bind as bind,
        run_server as run_server,
    )
    from jaxgen.serving.settings import ServerSettings as ServerSettings

_HOMES = {
    "AsyncEngine": "jaxgen.serving.async_engine",
    "Fleet": "jaxgen.serving.replicas.fleet",
    "ListenSettings": "jaxgen.serving.server",
    "Server": "jaxgen.serving.server",
    "ServerSettings": "jaxgen.serving.settings",
    "bind": "jaxgen.serving.server",
    "create_app": "jaxgen.serving.app",
    "create_front": "jaxgen.serving.replicas.front",
    "run_server": "jaxgen.serving.server",
    "settle_process": "jaxgen.serving.process",
}

_EXTRA = ("httptools", "prometheus_client", "pydantic", "starlette", "uvicorn", "uvloop")

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxgen.serving' has no attribute {name!r}")
    try:
        home = import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        raise RefusedInput(
            f"a server needs {package}, which is not installed: pip install 'jaxgen[serve]'"
        ) from None
    value = getattr(home, name)
    globals()[name] = value
    return value
