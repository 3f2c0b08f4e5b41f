"""Uvicorn's HTTP parser with bounds: how large a request's head may be, and how slow."""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol


class _HeadTooLarge(Exception):
    """Stops the parser; its caller has been answered."""


def bounded_http(*, head_bytes: int, head_seconds: float) -> type[HttpToolsProtocol]:
    """A protocol class for uvicorn's `http`.

    head_bytes: of request line and headers together, else 431. head_seconds: from the connection,
    or from a request's first byte, to the end of its headers, else the connection is closed.
    """

    class BoundedHTTP(HttpToolsProtocol):
        def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 (uvicorn's own)
            super().__init__(*args, **options)
            self._head_timer: asyncio.TimerHandle | None = None
            self._head_size = 0
            self._counted = 0
            self._in_head = True
            self._refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            before = self._in_head
            super().data_received(data)
            if before and self._in_head and not self._refused:
                self._grow(len(data) - self._counted, lambda: None)
            self._counted = 0

        def on_message_begin(self) -> None:
            self._in_head, self._head_size = True, 0
            self._arm()
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + 4)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._disarm()
            super().on_headers_complete()

        def send_400_response(self, msg: str) -> None:
            if not self._refused:
                super().send_400_response(msg)

        def _count(self, size: int) -> None:
            self._counted += size
            self._grow(size, self._stop_parser)

        def _grow(self, size: int, then: Callable[[], None]) -> None:
            self._head_size += size
            if self._head_size > head_bytes:
                self._refused = True
                head = b"content-length: 0\r\nconnection: close\r\n\r\n"
                self.transport.write(STATUS_LINE[431] + head)
                self.transport.close()
                then()

        def _stop_parser(self) -> None:
            raise _HeadTooLarge

        def _arm(self) -> None:
            self._disarm()
            self._head_timer = self.loop.call_later(head_seconds, self._too_slow)

        def _disarm(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _too_slow(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

    return BoundedHTTP
