"""A route described once: Starlette serves it, and the OpenAPI document tells of it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxgen.serving.bodies import read_body
from jaxgen.serving.context import Serving

type Handler = Callable[[Serving, Request], Awaitable[Response]]
type BodyHandler[Model] = Callable[[Serving, Request, Model], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path.

    body, answer: the models of request and response; None for no body, or for text. streams: the
    answer may be server-sent events. open: served without an API key.
    """

    method: str
    path: str
    summary: str
    route: Route
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    media: str = "application/json"
    streams: bool = False
    open: bool = False


def get(
    path: str,
    handler: Handler,
    summary: str,
    *,
    answer: type[BaseModel] | None = None,
    media: str = "application/json",
    open: bool = False,
    method: str = "GET",
) -> Endpoint:
    """An endpoint that reads nothing from its caller. `method` may be POST for commands."""

    async def serve(request: Request) -> Response:
        return await handler(request.app.state.serving, request)

    route = Route(path, serve, methods=[method])
    return Endpoint(method, path, summary, route, answer=answer, media=media, open=open)


def post[Model: BaseModel](
    path: str,
    handler: BodyHandler[Model],
    summary: str,
    body: type[Model],
    *,
    answer: type[BaseModel],
    streams: bool = False,
) -> Endpoint:
    """An endpoint that takes a JSON body, which is validated before `handler` sees it."""

    async def serve(request: Request) -> Response:
        serving: Serving = request.app.state.serving
        read = await read_body(request, body, serving.settings.max_json_depth)
        return await handler(serving, request, read)

    route = Route(path, serve, methods=["POST"])
    return Endpoint("POST", path, summary, route, body=body, answer=answer, streams=streams)
