"""A server on a free port of this machine, in a thread of this process."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

import httpx
from starlette.applications import Starlette

from jaxgen.serving.context import Serving
from jaxgen.serving.server import ListenSettings, Server, bind


class Live:
    """base_url: where it listens. serving: its state. stop(): what SIGTERM does."""

    def __init__(self, app: Starlette, **listen) -> None:
        settings = ListenSettings(host="127.0.0.1", port=0, **listen)
        self.serving: Serving = app.state.serving
        self._bound = bind(settings)
        self.port: int = self._bound.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._server = Server(app, settings)
        self._thread = threading.Thread(target=self._server.run, args=([self._bound],), daemon=True)

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self._server.started and self.serving.whats_wrong() is None)

    def stop(self) -> None:
        self._server.handle_exit(15, None)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._bound.close()


@contextmanager
def live(app: Starlette, **listen) -> Generator[Live]:
    """Listens while the block runs; listen: of ListenSettings."""
    server = Live(app, **listen)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        server.join()


def wait_until(true, seconds: float = 30.0) -> None:
    """Returns when true() is; fails after so many seconds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def post(server: Live, path: str, body: object, **options) -> httpx.Response:
    """One request, on a connection of its own."""
    return httpx.post(server.base_url + path, json=body, timeout=60, **options)
