"""Work that lasts as long as its client: who hangs up, or stops reading, stops the work."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxgen.serving.errors import as_api_error

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""The status that is logged where nobody was left to be answered (nginx's)."""

_LOOK_SECONDS = 5.0
DONE = b"data: [DONE]\n\n"
DIRECT_SEND = "direct_send"
"""Where a request's state has the way to the client that the layers inside the guard do not see.

They look at a response's beginning only, but each costs every piece of a stream a coroutine.
"""


class ClientGone(Exception):
    """The client hung up, or has read nothing for too long."""


async def while_connected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; cancelled, with ClientGone, when the client hangs up."""
    return await _watched(receive, _begun(work), None, 0.0)


class JSONAnswer(Response):
    """A JSON body of plain values."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:  # noqa: ANN401
        """JSON in UTF-8; not-finite numbers are a mistake of ours."""
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()


class EventStream(Response):
    """Server-sent events, one send a piece. The first piece decides between 200 and an error.

    What fails later is told as an event, since the status has been sent.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        *,
        stalled_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """pieces: whole events. A client that reads nothing for stalled_seconds is given up."""
        plain = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        super().__init__(None, headers=plain, media_type="text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self._pieces = pieces
        self._stalled_seconds = stalled_seconds
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the pieces end, or the client is gone."""
        state = scope.get("state", {})
        writer = _begun(self._write(send, state.get(DIRECT_SEND, send)))
        await _watched(receive, writer, self, self._stalled_seconds)

    def stalled_for(self) -> float:
        """Seconds that the piece under way has been waiting for the client."""
        return 0.0 if self._sending_since is None else time.monotonic() - self._sending_since

    async def _write(self, send: Send, direct: Send) -> None:
        """direct: for the pieces."""
        started = False
        async with aclosing(self._pieces) as pieces:
            try:
                async for piece in pieces:
                    if not started:
                        await self._start(send)
                        started = True
                    self._sending_since = time.monotonic()
                    await direct({"type": "http.response.body", "body": piece, "more_body": True})
                    self._sending_since = None
            except Exception as error:
                if not started:
                    raise
                api = as_api_error(error)
                if api.status == 500:
                    logger.exception("a stream failed")
                event = f"data: {json.dumps(api.body())}\n\n".encode() + DONE
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})


def _begun[T](work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that is at work already when this returns.

    A task that waited for its turn would wait for all requests that came with its own to be read:
    the engine would begin with the first when it knows the last.
    """
    return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)


async def _watched[T](
    receive: Receive, job: asyncio.Task[T], stream: EventStream | None, stalled_seconds: float
) -> T:
    gone = asyncio.create_task(_hung_up(receive))
    try:
        while not job.done():
            await asyncio.wait(
                {gone, job}, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if not job.done() and gone.done():
                raise ClientGone("the client hung up")
            if not job.done() and stream is not None and stream.stalled_for() > stalled_seconds:
                raise ClientGone(f"the client read nothing for {stalled_seconds:.0f} s")
        return job.result()
    finally:
        for task in (gone, job):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
