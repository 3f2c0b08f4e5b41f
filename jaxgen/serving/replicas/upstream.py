"""A request to a replica, on a connection of its own: the answer is read as it comes.

What one read of the socket brings is one piece, however many chunks it is: a front that cannot keep
up with thousands of small events passes on fewer and larger ones.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import httptools

_READ_BYTES = 1 << 16


class NotReached(ConnectionError):
    """There is no connection: nothing was sent."""


class BrokenOff(ConnectionError):
    """The answer ended before its end."""


class Answer:
    """An answer whose head has come: status, headers (names in lower case)."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, head_only: bool
    ) -> None:
        self.headers: dict[str, str] = {}
        self.status = 0
        self._reader = reader
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._has_head = False
        self._complete = head_only

    async def head(self) -> None:
        """Reads until the status and the headers are there. BrokenOff."""
        while not self._has_head:
            await self._feed()
        self.status = self._parser.get_status_code()

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The body as it comes. BrokenOff if its end does not."""
        while True:
            if self._parts:
                parts, self._parts = self._parts, []
                yield b"".join(parts)
            if self._complete:
                return
            await self._feed()

    async def body(self) -> bytes:
        """All of the body."""
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Lets go of the connection; a replica that still writes sees its client gone."""
        self._writer.close()

    async def _feed(self) -> None:
        try:
            data = await self._reader.read(_READ_BYTES)
        except OSError as error:
            raise BrokenOff(error.strerror or str(error)) from error
        if not data:
            raise BrokenOff("the connection was closed")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise BrokenOff(f"what it says is no HTTP: {error}") from error

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._has_head = True

    def on_body(self, data: bytes) -> None:
        """Called by the parser, once a chunk."""
        self._parts.append(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._complete = True


async def ask(
    port: int, method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes
) -> Answer:
    """Sends a request to a port of this machine. NotReached, or BrokenOff before the answer's head.

    target, headers: as a parser of HTTP has found them in another request.
    """
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        raise NotReached(error.strerror or str(error)) from error
    answer = Answer(reader, writer, head_only=method == "HEAD")
    lines = [
        b"%b %b HTTP/1.1" % (method.encode(), target),
        *(b"%b: %b" % pair for pair in headers),
        *(b"host: replica", b"connection: close", b"content-length: %d" % len(body)),
    ]
    try:
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        await answer.head()
    except BaseException:
        answer.close()
        raise
    return answer
