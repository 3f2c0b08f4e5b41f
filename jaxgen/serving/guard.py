"""What every HTTP request passes: its id, key, size and time limits, error bodies and the log."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Collection
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxgen.serving.connection import CLIENT_GONE, DIRECT_SEND, ClientGone
from jaxgen.serving.errors import ApiError, as_api_error
from jaxgen.serving.settings import ServerSettings

logger = logging.getLogger(__name__)
access = logging.getLogger("jaxgen.access")

REQUEST_ID = "x-request-id"
_OWN_ROOTS = ("/v1", "/mii")
"""Prefixes that our own paths have: a proxy must strip these, or nobody could tell."""

_SAFE_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


class HttpMetrics(Protocol):
    """Counts responses."""

    def http(self, method: str, handler: str, status: int, seconds: float) -> None:
        """A response has ended. handler: the route's path."""
        ...


class Guarded(Protocol):
    """What is behind the middleware."""

    @property
    def settings(self) -> ServerSettings:
        """Keys and limits."""
        ...

    @property
    def metrics(self) -> HttpMetrics:
        """To be told of every response."""
        ...


class Guard:
    """ASGI middleware around all routes."""

    def __init__(self, app: ASGIApp, serving: Guarded, open_paths: Collection[str]) -> None:
        """open_paths: served without an API key; every other path, known or not, needs one."""
        self._app = app
        self._serving = serving
        self._open = frozenset(open_paths)
        self._keys = [_digest(key) for key in serving.settings.api_keys]
        root = serving.settings.root_path.rstrip("/")
        self._root = "" if root in _OWN_ROOTS else root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; whatever is raised becomes an error body, or ends the stream."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Not the HTTP server's business: it would take every path for one without the prefix.
        scope["root_path"] = scope.get("root_path") or self._root
        headers = Headers(scope=scope)
        exchange = _Exchange(send, _request_id(headers.get(REQUEST_ID)))
        state = scope.setdefault("state", {})
        state["request_id"], state[DIRECT_SEND] = exchange.request_id, send
        began = time.monotonic()
        try:
            self._check_key(scope, headers)
            limited = _limited(receive, headers, self._serving)
            await self._app(scope, limited, exchange.send)
        except (ClientGone, ClientDisconnect):
            exchange.status = CLIENT_GONE
        except Exception as error:
            await self._fail(error, scope, receive, exchange)
        finally:
            self._log(scope, exchange, time.monotonic() - began)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        """Compares with all keys, in a time that tells nothing of them."""
        if not self._keys or self._open_path(scope) or scope["method"] == "OPTIONS":
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        found = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(found):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _open_path(self, scope: Scope) -> bool:
        path = scope["path"]
        return path in self._open or path.removeprefix(scope.get("root_path", "")) in self._open

    async def _fail(
        self, error: Exception, scope: Scope, receive: Receive, exchange: "_Exchange"
    ) -> None:
        told = as_api_error(error)
        if told.status == 500:
            logger.error("%s failed", exchange.request_id, exc_info=error)
        if exchange.status is None:
            await told.response()(scope, receive, exchange.send)
        else:
            raise error  # the headers are out: the server closes the connection

    def _log(self, scope: Scope, exchange: "_Exchange", seconds: float) -> None:
        status = CLIENT_GONE if exchange.status is None else exchange.status
        route = scope.get("route")
        handler = getattr(route, "path", "none")  # never the client's: labels must stay few
        method = scope["method"] if handler != "none" else "none"
        self._serving.metrics.http(method, handler, status, seconds)
        if self._serving.settings.access_log:
            path = scope.get("raw_path") or scope["path"].encode(errors="replace")
            shown = path[:200].decode("ascii", "backslashreplace")
            name, client = exchange.request_id, (scope.get("client") or ("-",))[0]
            access.info(
                "%s %s %s %s %d %.1f ms",
                client,
                name,
                scope["method"],
                shown,
                status,
                1e3 * seconds,
            )


class _Exchange:
    """The response as it goes out: remembers its status, and adds the request's id."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self.request_id
        await self._send(message)


def _limited(receive: Receive, headers: Headers, serving: Guarded) -> Receive:
    """`receive` that refuses bodies which are too long, or too long in coming."""
    most, seconds = serving.settings.max_body_bytes, serving.settings.body_seconds
    announced = headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > most:
        raise _too_large(most)
    seen, complete, end = 0, False, asyncio.get_running_loop().time() + seconds

    async def limited() -> Message:
        nonlocal seen, complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout_at(end):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {seconds:.0f} s",
                headers={"Connection": "close"},
            ) from None
        seen += len(message.get("body", b""))
        if seen > most:
            raise _too_large(most)
        complete = not message.get("more_body", False)
        return message

    return limited


def _too_large(most: int) -> ApiError:
    message = f"the body is larger than {most} bytes"
    return ApiError(413, message, headers={"Connection": "close"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _request_id(given: str | None) -> str:
    """The client's own id if it is harmless, otherwise a new one."""
    return given if given is not None and _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
