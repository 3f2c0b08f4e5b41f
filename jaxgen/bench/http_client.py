"""An HTTP/1.1 client for load tests: what arrives is timed at the socket, and costs little.

Streams are handed on piece by piece from the event loop's own callback, so that neither a queue nor
a task stands between the network and the clock.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from jaxgen_checkpoints.errors import RefusedInput

try:
    import httptools
except ImportError as error:
    raise RefusedInput(
        "a load test needs httptools, which is not installed: pip install 'jaxgen[bench]'"
    ) from error

type OnPiece = Callable[[bytes, float], None]


@dataclass(frozen=True, slots=True)
class Reply:
    """A response that has ended. body: of one that was not handed on piece by piece."""

    status: int
    body: bytes


class HTTPClient:
    """Requests to one server; idle connections are used again, new ones opened without a limit."""

    def __init__(
        self, base_url: str, *, headers: Mapping[str, str] | None = None, verify: bool = True
    ) -> None:
        """base_url: http or https, with a path or without. verify: whose certificate is good."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RefusedInput(f"expected a URL like http://127.0.0.1:8000, got {base_url!r}")
        self.url = base_url.rstrip("/")
        self._path = parts.path.rstrip("/")
        self._host, self._port = parts.hostname, parts.port
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            if not verify:
                self._tls.check_hostname = False
                self._tls.verify_mode = ssl.CERT_NONE
        port = self._port or (443 if self._tls else 80)
        self._address = (self._host, port)
        self._headers = {"Host": parts.netloc.rpartition("@")[2], **(headers or {})}
        self._idle: list[_Connection] = []

    async def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        on_piece: OnPiece | None = None,
    ) -> Reply:
        """One request, until its answer has ended.

        on_piece: called with each piece of a 200's body and the reading of time.perf_counter() at
        its arrival. OSError if the server cannot be reached, or hangs up before the end.
        """
        head = self._head(method, path, len(body), headers or {})
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                try:
                    return await self._on(connection, head + body, on_piece)
                except _Untouched:
                    continue  # the server ended an idle connection: it has seen no request
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, *self._address, ssl=self._tls)
        return await self._on(connection, head + body, on_piece)

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Closes all connections that are idle, and those whose requests were given up."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # a transport is closed in the loop's next turn

    async def _on(
        self, connection: "_Connection", request: bytes, on_piece: OnPiece | None
    ) -> Reply:
        try:
            reply = await connection.exchange(request, on_piece)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    def _head(self, method: str, path: str, length: int, headers: Mapping[str, str]) -> bytes:
        lines = [f"{method} {self._path}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in {**self._headers, **headers}.items()]
        if length:
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        if any("\r" in line or "\n" in line for line in lines):
            raise RefusedInput("a header must not contain a line break")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


class _Untouched(ConnectionError):
    """The connection ended before a byte of the answer."""


class _Connection(asyncio.Protocol):
    """One socket, one exchange at a time; the parser calls the on_... methods."""

    def __init__(self) -> None:
        self.closed = self.reusable = False
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[Reply] | None = None
        self._on_piece: OnPiece | None = None
        self._body = bytearray()
        self._now = 0.0
        self._touched = self._pass_on = False

    async def exchange(self, request: bytes, on_piece: OnPiece | None) -> Reply:
        """Sends, and waits for the end of the answer."""
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._on_piece, self._touched = on_piece, False
        self._body = bytearray()
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        self.closed = True
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now, self._touched = time.perf_counter(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"what the server answers is not HTTP/1.1: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self._touched:
            self._fail(_Untouched("the server hung up before it answered"))
        else:
            self._fail(ConnectionError(f"the server hung up within its answer: {exc or 'closed'}"))

    def on_headers_complete(self) -> None:
        self._pass_on = self._on_piece is not None and self._parser.get_status_code() == 200

    def on_body(self, body: bytes) -> None:
        if self._pass_on and self._on_piece is not None:
            try:
                self._on_piece(body, self._now)
            except ValueError as error:
                self._fail(error)
        else:
            self._body += body

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(Reply(self._parser.get_status_code(), bytes(self._body)))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
