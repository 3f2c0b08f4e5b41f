"""One request passed on to a replica, and its answer passed back: whole, or as it streams."""

from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxgen.serving.connection import EventStream, while_connected
from jaxgen.serving.errors import ApiError, unavailable
from jaxgen.serving.guard import REQUEST_ID
from jaxgen.serving.replicas.fleet import Fleet
from jaxgen.serving.replicas.replica import Replica
from jaxgen.serving.replicas.upstream import Answer, BrokenOff, NotReached, ask

_ASKED_WITH = (b"authorization", b"content-type")
_ANSWERED_WITH = ("retry-after", "allow")
"""Headers that are passed on; all others concern one connection, or the front alone."""

_MOST_BROKEN = 1
"""A request whose replica went before it said anything is given to so many more: if the request
itself kills replicas, it does not get them all."""

_BROKE_OFF = "the replica that had this request has ended"
_END = b"\n\n"


class Held:
    """What a request takes up of a replica, until it is let go: once."""

    def __init__(self, replica: Replica, prompts: int) -> None:
        self._replica = replica
        self._prompts = prompts

    def let_go(self, *, failed: bool) -> None:
        """The request has ended."""
        self._replica.outstanding -= self._prompts
        if self._prompts and failed:
            self._replica.failed += 1
        elif self._prompts:
            self._replica.served += 1
        self._prompts = 0


class PassedStream(EventStream):
    """Events of a replica as they come. Whole ones: an error can follow if the replica ends."""

    def __init__(self, held: Held, answer: Answer, stalled_seconds: float) -> None:
        super().__init__(self._events(), stalled_seconds=stalled_seconds)
        self._held = held
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the events end, or the client is gone; then the replica knows, too."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._held.let_go(failed=False)
            self._answer.close()

    async def _events(self) -> AsyncGenerator[bytes]:
        begun = b""
        try:
            async for piece in self._answer.pieces():
                events, end, begun = (begun + piece).rpartition(_END)
                if end:
                    yield events + end
        except BrokenOff as error:
            self._held.let_go(failed=True)
            raise ApiError(500, _BROKE_OFF) from error
        if begun:
            yield begun


async def pass_on(
    fleet: Fleet, request: Request, body: bytes, prompts: int, stalled_seconds: float
) -> Response:
    """A replica's answer. ApiError 503 if none is ready, 500 if it ends before it has answered."""
    held, answer = await while_connected(request.receive, reach(fleet, request, body, prompts))
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return PassedStream(held, answer, stalled_seconds)
    try:
        return await while_connected(request.receive, whole(held, answer))
    finally:  # also where the client was gone before the reading began
        held.let_go(failed=False)
        answer.close()


async def reach(
    fleet: Fleet, request: Request, body: bytes, prompts: int, first: Replica | None = None
) -> tuple[Held, Answer]:
    """An answer that begins, and what is held for it.

    first: who is asked first, if it is ready; default the one with the fewest prompts.
    """
    tried: list[Replica] = []
    broken = 0
    while True:
        replica = fleet.take(prompts, but=tried, first=first)
        if replica is None and broken:
            raise ApiError(500, _BROKE_OFF)
        if replica is None:
            raise unavailable("no replica is ready")
        held = Held(replica, prompts)
        try:
            headers = _headers(request)
            method, path = request.method, target(request)
            return held, await ask(replica.port, method, path, headers, body)
        except (NotReached, BrokenOff) as error:
            held.let_go(failed=True)
            replica.lost(f"it does not answer: {error}")
            tried.append(replica)
            broken += isinstance(error, BrokenOff)
            if broken > _MOST_BROKEN:
                raise ApiError(500, _BROKE_OFF) from error
        except BaseException:
            held.let_go(failed=False)
            raise


async def whole(held: Held, answer: Answer) -> Response:
    """The answer once all of it is there."""
    headers = {name: answer.headers[name] for name in _ANSWERED_WITH if name in answer.headers}
    failed = False
    try:
        content = await answer.body()
    except BrokenOff as error:
        failed = True
        raise ApiError(500, _BROKE_OFF) from error
    finally:
        held.let_go(failed=failed)
        answer.close()
    media = answer.headers.get("content-type")
    return Response(content, answer.status, headers=headers, media_type=media)


def target(request: Request) -> bytes:
    """Path and query as a replica knows them: without the prefix of a proxy."""
    root = request.scope.get("root_path", "").encode()
    path = request.scope["raw_path"].removeprefix(root)
    query = request.scope["query_string"]
    return path + b"?" + query if query else path


def _headers(request: Request) -> list[tuple[bytes, bytes]]:
    given = [pair for pair in request.headers.raw if pair[0].lower() in _ASKED_WITH]
    return [*given, (REQUEST_ID.encode(), request.state.request_id.encode())]
