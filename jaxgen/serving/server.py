"""Uvicorn around the application: a socket, TLS, limits, and an end that drops no answer."""

import asyncio
import logging
import signal
import socket
import ssl
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from jaxgen.serving.http_protocol import bounded_http
from jaxgen.serving.settings import ServerSettings
from jaxgen_checkpoints.errors import ConfigError, RefusedInput

logger = logging.getLogger(__name__)

_AFTER_ABORT_SECONDS = 10


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Where a server listens, and its connections' limits. ConfigError, naming the field.

    host: None for all addresses. port: 0 takes a free one. drain_seconds: what runs may take so
    long after SIGTERM. head_bytes, head_seconds: of a request's line and headers.
    """

    host: str | None = None
    port: int = 8000
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = ssl.CERT_NONE
    drain_seconds: float = 30.0
    keep_alive_seconds: int = 75
    head_bytes: int = 64 * 2**10
    head_seconds: float = 20.0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port must be from 0 to 65535, got {self.port}")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile belong together: give both")
        if self.drain_seconds < 0:
            raise ConfigError(f"drain_seconds must not be negative, got {self.drain_seconds}")


class Served(Protocol):
    """`app.state.serving`: what a server must know of its application."""

    draining: bool
    failure: Exception | None

    @property
    def settings(self) -> ServerSettings:
        """Of the application."""
        ...

    @property
    def active(self) -> int:
        """Continuations being served."""
        ...

    def whats_wrong(self) -> str | None:
        """Why nothing can be generated; None while all is well."""
        ...

    async def abort(self, public_id: str | None) -> None:
        """Ends one request, or all for None."""
        ...


def bind(listen: ListenSettings, *, shared: bool = False) -> socket.socket:
    """A socket that holds the address and does not listen yet. RefusedInput if it is taken.

    A server that has just ended holds nobody up; one that loads its model does, though it does not
    listen either. shared: another process that binds the address too may listen on it.
    """
    host = listen.host or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, listen.port))
    except OSError as error:
        bound.close()
        place = f"{host or '0.0.0.0'}:{listen.port}"
        raise RefusedInput(f"cannot listen on {place}: {error.strerror}") from error
    # Linux lets sockets that all say so share an address until one of them listens.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(shared))
    return bound


def start_listening(bound: socket.socket) -> None:
    """Connections to a socket from `bind` wait for the server from now. RefusedInput if taken."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.listen()
    except OSError as error:
        raise RefusedInput(f"cannot listen on {bound.getsockname()}: {error.strerror}") from error


def run_server(
    app: Starlette, listen: ListenSettings | None = None, bound: socket.socket | None = None
) -> None:
    """Serves `app` (from create_app) until SIGTERM or SIGINT, then lets what runs end.

    A second signal ends it at once. bound: a socket from `bind`. Raises what kept the engine from
    starting.
    """
    listen = listen or ListenSettings()
    held = bind(listen) if bound is None else bound
    serving: Served = app.state.serving
    server = Server(app, listen)
    start_listening(held)
    host, port = held.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if listen.ssl_certfile is None else "https"
    logger.info("listening on %s://%s:%d%s", scheme, shown, port, serving.settings.root_path)
    try:
        server.run([held])
    finally:
        held.close()
    if serving.failure is not None:
        raise serving.failure


class Server(uvicorn.Server):
    """uvicorn.Server that tells the application of its end, and gives answers time to end."""

    def __init__(self, app: Starlette, listen: ListenSettings) -> None:
        self._serving: Served = app.state.serving
        self._drain_seconds = listen.drain_seconds
        config = uvicorn.Config(
            app,
            http=bounded_http(head_bytes=listen.head_bytes, head_seconds=listen.head_seconds),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=listen.keep_alive_seconds,
            timeout_graceful_shutdown=int(listen.drain_seconds) + _AFTER_ABORT_SECONDS,
            ssl_keyfile=listen.ssl_keyfile,
            ssl_certfile=listen.ssl_certfile,
            ssl_ca_certs=listen.ssl_ca_certs,
            ssl_cert_reqs=listen.ssl_cert_reqs,
        )
        super().__init__(config)

    def stop(self) -> None:
        """What SIGTERM does; for a server whose `run` is in another thread."""
        self.handle_exit(signal.SIGTERM, None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets what runs end, the second does not; neither kills the process."""
        self._serving.draining = True
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Also ends when the engine could not be started."""
        return await super().on_tick(counter) or self._serving.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits drain_seconds for answers; those left are ended with an error that says why."""
        self._serving.draining = True
        if self._serving.active:
            logger.info("stopping: %d continuations may end first", self._serving.active)
        aborting = asyncio.create_task(self._abort_later())
        try:
            await super().shutdown(sockets)
        finally:
            aborting.cancel()

    async def _abort_later(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        if self._serving.active and self._serving.whats_wrong() is None:
            await self._serving.abort(None)
