"""The ASGI application: routes around an engine, which starts and ends with it."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from jaxgen.serving.context import Serving
from jaxgen.serving.endpoint import Endpoint, get, post
from jaxgen.serving.errors import ApiError
from jaxgen.serving.guard import REQUEST_ID, Guard, Guarded
from jaxgen.serving.openapi import openapi_document
from jaxgen.serving.protocol.chat import ChatAnswer, ChatRequest
from jaxgen.serving.protocol.completion import CompletionAnswer, CompletionRequest
from jaxgen.serving.protocol.responses import ResponsesAnswer, ResponsesRequest
from jaxgen.serving.protocol.service import (
    AbortRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    GenerateAnswer,
    GenerateRequest,
    MIIAnswer,
    MIIRequest,
    ModelCard,
    ModelList,
    Success,
    TokenizeAnswer,
    TokenizeRequest,
)
from jaxgen.serving.routes import commands, native, service, tokens
from jaxgen.serving.routes.absent import absent
from jaxgen.serving.routes.chat import chat_completions
from jaxgen.serving.routes.completions import completions
from jaxgen.serving.routes.mii import mii
from jaxgen.serving.routes.responses import responses
from jaxgen.serving.settings import ServerSettings

if TYPE_CHECKING:
    from jaxgen.serving.async_engine import AsyncEngine

logger = logging.getLogger(__name__)


def create_app(
    engine: "AsyncEngine",
    settings: ServerSettings | None = None,
    *,
    prepare: Callable[[], None] | None = None,
) -> Starlette:
    """An application that owns `engine`: its lifespan starts and stops it.

    prepare: called in a thread before the engine starts, to load or compile what must be; /ready
    and /health are 503 until it has returned. A server that is stopped meanwhile does not wait for
    it. `app.state.serving` is the server's state.
    """
    serving = Serving(engine, settings or ServerSettings())
    endpoints = all_endpoints()
    open_paths = [endpoint.path for endpoint in endpoints if endpoint.open]
    app = Starlette(
        routes=[endpoint.route for endpoint in endpoints],
        middleware=middleware(serving, open_paths),
        exception_handlers={HTTPException: routing_error},
        lifespan=_lifespan(serving, prepare),
    )
    app.state.serving = serving
    described = partial(
        openapi_document,
        endpoints,
        title="jaxgen",
        version=version("jaxgen"),
        secured=bool(serving.settings.api_keys),
    )
    app.state.openapi = cache(described)  # made when it is first asked for: it takes a while
    return app


def all_endpoints() -> Sequence[Endpoint]:
    """Every route, in the order of the OpenAPI document."""
    return (*_generation(), *_service())


def _generation() -> Sequence[Endpoint]:
    return (
        get("/v1/models", service.models, "Names of the model", answer=ModelList),
        get("/v1/models/{model:path}", service.model, "One name of the model", answer=ModelCard),
        post(
            *("/v1/completions", completions, "Go on from a prompt", CompletionRequest),
            answer=CompletionAnswer,
            streams=True,
        ),
        post(
            *("/v1/chat/completions", chat_completions, "Answer a conversation", ChatRequest),
            answer=ChatAnswer,
            streams=True,
        ),
        post(
            *("/v1/responses", responses, "Answer items", ResponsesRequest),
            answer=ResponsesAnswer,
            streams=True,
        ),
        post(
            *("/generate", native.generate, "SGLang's native request", GenerateRequest),
            answer=GenerateAnswer,
            streams=True,
        ),
        post(
            *("/mii/{deployment:path}", mii, "DeepSpeed-MII's request", MIIRequest),
            answer=MIIAnswer,
            streams=True,
        ),
    )


def _service() -> Sequence[Endpoint]:
    text, html = "text/plain", "text/html"
    return (
        *(
            post(path, tokens.tokenize, "Text to ids", TokenizeRequest, answer=TokenizeAnswer)
            for path in ("/tokenize", "/v1/tokenize")
        ),
        *(
            post(path, tokens.detokenize, "Ids to text", DetokenizeRequest, answer=DetokenizeAnswer)
            for path in ("/detokenize", "/v1/detokenize")
        ),
        get("/tokenizer_info", tokens.tokenizer_info, "Special tokens and the chat template"),
        post("/abort_request", commands.abort_request, "End", AbortRequest, answer=Success),
        *(
            get(path, commands.flush_cache, "Forget cached prefixes", answer=Success, method=method)
            for path, method in (
                *(("/flush_cache", "POST"), ("/flush_cache", "GET")),
                ("/reset_prefix_cache", "POST"),
            )
        ),
        *(
            get(path, commands.model_info, "The model, by SGLang's names")
            for path in ("/get_model_info", "/model_info")
        ),
        *(
            get(path, commands.server_info, "Model and load, by SGLang's names")
            for path in ("/get_server_info", "/server_info")
        ),
        get("/health_generate", commands.health_generate, "Whether a token can be generated"),
        get("/ready", service.ready, "Whether requests are taken", open=True),
        get("/health", service.health, "Whether the engine can generate", open=True),
        *(
            get("/ping", service.health, "The same, by SageMaker's name", open=True, method=method)
            for method in ("GET", "POST")
        ),
        get("/load", service.load, "Continuations being served"),
        get("/version", service.about, "The server's version", open=True),
        get("/metrics", service.metrics, "For Prometheus", media=text, open=True),
        get("/openapi.json", service.openapi, "This document", open=True),
        get("/status.json", service.status, "The status page's numbers", open=True),
        get("/", service.status_page, "The status page", media=html, open=True),
    )


def middleware(serving: Guarded, open_paths: Sequence[str]) -> list[Middleware]:
    """What every request passes. open_paths: served without an API key."""
    settings = serving.settings
    guard = Middleware(Guard, serving=serving, open_paths=open_paths)
    if not settings.allowed_origins:
        return [guard]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=[REQUEST_ID, "Retry-After"],
    )
    return [cors, guard]


async def routing_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same form as every other error."""
    assert isinstance(error, HTTPException)
    message = error.detail
    told = absent(request.url.path.removeprefix(request.scope.get("root_path", "")))
    if error.status_code == 404 and told is not None:
        return ApiError(501, told).response()
    if error.status_code == 404:
        message = f"there is no route {request.method} {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    headers: Mapping[str, str] = error.headers or {}
    return ApiError(error.status_code, message, headers=dict(headers)).response()


def _lifespan(
    serving: Serving, prepare: Callable[[], None] | None
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        starting = asyncio.create_task(_start(serving, prepare))
        try:
            yield
        finally:
            serving.draining = True
            if serving.preparing:
                starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
            if serving.ready:
                await serving.engine.stop(0)

    return lifespan


async def _start(serving: Serving, prepare: Callable[[], None] | None) -> None:
    """Until it is done the server answers, and says that it is not ready."""
    try:
        if prepare is not None:
            serving.preparing = True
            await _in_daemon(prepare)
            serving.preparing = False
        await serving.engine.start()
    except Exception as error:
        logger.exception("the engine could not be started")
        serving.failure = error
        serving.preparing = False
    else:
        serving.ready = True
        logger.info("ready: serving %s", ", ".join(serving.names))


async def _in_daemon(function: Callable[[], None]) -> None:
    """Waits for `function` in a thread that, unlike those of to_thread, nobody must wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        failed: Exception | None = None
        try:
            function()
        except BaseException as error:  # whatever it is, nobody may wait for this thread for ever
            failed = error if isinstance(error, Exception) else RuntimeError(repr(error))
        with suppress(RuntimeError):  # the server has ended meanwhile, and its loop with it
            loop.call_soon_threadsafe(tell, failed)

    threading.Thread(target=run, name="jaxgen-prepare", daemon=True).start()
    await done
