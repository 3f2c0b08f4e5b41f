"""Serving: one thread owns the engine, asyncio talks to it, HTTP talks to that.

Names are imported when they are first used: the engine alone needs no web framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxgen.serving.app import create_app as create_app
    from jaxgen.serving.async_engine import AsyncEngine as AsyncEngine
    from jaxgen.serving.server import (
        ListenSettings as ListenSettings,
        run_server as run_server,
    )
    from jaxgen.serving.settings import ServerSettings as ServerSettings

_HOMES = {
    "AsyncEngine": "jaxgen.serving.async_engine",
    "ListenSettings": "jaxgen.serving.server",
    "ServerSettings": "jaxgen.serving.settings",
    "create_app": "jaxgen.serving.app",
    "run_server": "jaxgen.serving.server",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxgen.serving' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
