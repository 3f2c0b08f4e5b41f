"""The application in front of several replicas: its own health and metrics, all else passed on."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from jaxgen.serving.app import all_endpoints, middleware, routing_error
from jaxgen.serving.connection import JSONAnswer
from jaxgen.serving.errors import unavailable
from jaxgen.serving.replicas.batches import batch_of, merge_for, pass_parts
from jaxgen.serving.replicas.fleet import Fleet
from jaxgen.serving.replicas.merging import merge_metrics, merge_status
from jaxgen.serving.replicas.passing import pass_on, target
from jaxgen.serving.replicas.telling import FrontMetrics
from jaxgen.serving.routes.service import STATUS_PAGE
from jaxgen.serving.settings import ServerSettings
from jaxgen_checkpoints.errors import RefusedInput

logger = logging.getLogger(__name__)

_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class Front:
    """The state of the front process; to `run_server` it is what Serving is to one engine.

    Attributes: fleet, settings, metrics, ready (all replicas have been so), draining, failure.
    """

    def __init__(self, fleet: Fleet, settings: ServerSettings) -> None:
        self.fleet = fleet
        self.settings = settings
        self.metrics = FrontMetrics(fleet, settings.metrics_prefix)
        self.ready = False
        self.draining = False
        self.failure: Exception | None = None

    @property
    def active(self) -> int:
        """Prompts that the replicas have."""
        return sum(replica.outstanding for replica in self.fleet.replicas)

    def whats_wrong(self) -> str | None:
        """Why nothing can be generated; None while one replica can."""
        if self.failure is not None:
            return str(self.failure)
        if self.fleet.ready:
            return None if self.ready else "the replicas are being started"
        told = [f"{each.name}: {each.reason}" for each in self.fleet.replicas]
        return f"no replica is ready: {'; '.join(told)}"

    def health(self) -> dict[str, Any]:
        """Of each replica."""
        fleet = self.fleet
        return {
            "status": "ok" if len(fleet.ready) == len(fleet.replicas) else "degraded",
            "replicas": [
                {
                    "name": each.name,
                    "pid": each.pid,
                    "state": f"{each.state}: {each.reason}" if each.reason else str(each.state),
                    "outstanding": each.outstanding,
                    "served": each.served,
                    "failed": each.failed,
                }
                for each in fleet.replicas
            ],
        }

    async def abort(self, public_id: str | None) -> None:
        """Ends one request, or all for None, wherever it is."""
        keys = self.settings.api_keys
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        body = {"abort_all": True} if public_id is None else {"rid": public_id}
        await self.fleet.ask_all("POST", "/abort_request", json=body, headers=headers)


def create_front(fleet: Fleet, settings: ServerSettings | None = None) -> Starlette:
    """An application that owns `fleet`: its lifespan starts and stops the replicas."""
    front = Front(fleet, settings or ServerSettings())
    endpoints = all_endpoints()
    app = Starlette(
        routes=[
            Route(each.path, _OWN.get(each.path, _pass), methods=[each.method])
            for each in endpoints
        ],
        middleware=middleware(front, [each.path for each in endpoints if each.open]),
        exception_handlers={HTTPException: routing_error},
        lifespan=_lifespan,
    )
    app.state.serving = front
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncGenerator[None]:
    front: Front = app.state.serving
    starting = asyncio.create_task(_start(front))
    try:
        yield
    finally:
        front.draining = True
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        await front.fleet.stop()


async def _start(front: Front) -> None:
    try:
        await front.fleet.start()
    except RefusedInput as error:
        front.failure = error
    except Exception as error:
        logger.exception("the replicas could not be started")
        front.failure = error
    else:
        front.ready = True
        logger.info("ready: %d replicas", len(front.fleet.replicas))


async def _pass(request: Request) -> Response:
    front: Front = request.app.state.serving
    _check_open(front)
    body = await request.body()
    depth = front.settings.max_json_depth
    batch = batch_of(body, depth) if request.method == "POST" else None
    if batch is not None:
        path = target(request).decode(errors="replace").partition("?")[0]
        merge = merge_for(path, batch)
        if merge is not None and len(front.fleet.ready) > 1:
            return await pass_parts(front.fleet, request, batch, merge)
    prompts = 1 if batch is None else len(batch.prompts)
    return await pass_on(front.fleet, request, body, prompts, front.settings.stalled_seconds)


def _check_open(front: Front) -> None:
    wrong = "the server is stopping" if front.draining else front.whats_wrong()
    if wrong is not None:
        raise unavailable(wrong, front.settings.retry_after_seconds)


async def _to_all(request: Request) -> Response:
    """A command that concerns all of them; the answer is one of a replica that refused, or any."""
    front: Front = request.app.state.serving
    _check_open(front)
    names = ("authorization", "content-type")
    headers = {name: request.headers[name] for name in names if name in request.headers}
    body, path = await request.body(), target(request).decode()
    told = await front.fleet.ask_all("POST", path, content=body, headers=headers)
    if not told:
        raise unavailable("no replica answered", front.settings.retry_after_seconds)
    answer = max((answer for _, answer in told), key=lambda each: each.status_code)
    return Response(answer.content, answer.status_code, media_type="application/json")


async def _health(request: Request) -> Response:
    front: Front = request.app.state.serving
    wrong = front.whats_wrong()
    if wrong is not None:
        raise unavailable(wrong, front.settings.retry_after_seconds)
    return JSONAnswer(front.health())


async def _ready(request: Request) -> Response:
    front: Front = request.app.state.serving
    if front.draining:
        raise unavailable("the server is stopping", front.settings.retry_after_seconds)
    return await _health(request)


async def _load(request: Request) -> Response:
    return JSONAnswer({"server_load": request.app.state.serving.active})


async def _metrics(request: Request) -> Response:
    front: Front = request.app.state.serving
    told = await front.fleet.ask_all("GET", "/metrics")
    texts = [(replica.name, answer.text) for replica, answer in told]
    return Response(front.metrics.text() + merge_metrics(texts), media_type=_METRICS)


async def _status(request: Request) -> Response:
    front: Front = request.app.state.serving
    told = await front.fleet.ask_all("GET", "/status.json")
    if not told:
        raise unavailable(front.whats_wrong() or "no replica answered")
    state = front.whats_wrong() or ("stopping" if front.draining else "ready")
    numbers = merge_status([answer.json() for _, answer in told])
    return JSONAnswer({**numbers, "state": state, **front.health()})


async def _page(request: Request) -> Response:
    return HTMLResponse(STATUS_PAGE.read_text(encoding="utf-8"))


_OWN: dict[str, Callable[[Request], Awaitable[Response]]] = {
    "/abort_request": _to_all,
    "/flush_cache": _to_all,
    "/reset_prefix_cache": _to_all,
    "/health": _health,
    "/ping": _health,
    "/load": _load,
    "/ready": _ready,
    "/metrics": _metrics,
    "/status.json": _status,
    "/": _page,
}
