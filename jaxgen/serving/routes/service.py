"""What is asked of the server itself: models, health, version, metrics, its own description."""

import time
from importlib.metadata import version
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from jaxgen.serving.connection import JSONAnswer
from jaxgen.serving.context import Serving
from jaxgen.serving.errors import unavailable

STATUS_PAGE = Path(__file__).parents[1] / "status_page.html"
_STARTED = int(time.time())


async def models(serving: Serving, request: Request) -> Response:
    """Every name of the model."""
    cards = [_card(serving, name) for name in serving.names]
    return JSONAnswer({"object": "list", "data": cards})


async def model(serving: Serving, request: Request) -> Response:
    """One name of the model; 404 for another."""
    return JSONAnswer(_card(serving, serving.check_model(request.path_params["model"])))


async def health(serving: Serving, request: Request) -> Response:
    """200 while the engine can generate; 503 says why it cannot."""
    serving.need_engine()
    return JSONAnswer({"status": "ok"})


async def ready(serving: Serving, request: Request) -> Response:
    """200 once every step is compiled, and until the server begins to stop."""
    if serving.draining:
        raise unavailable("the server is stopping", serving.settings.retry_after_seconds)
    return await health(serving, request)


async def load(serving: Serving, request: Request) -> Response:
    """Continuations that are being served, as vLLM tells it."""
    return JSONAnswer({"server_load": serving.active})


async def about(serving: Serving, request: Request) -> Response:
    """The version that is served."""
    return JSONAnswer({"version": version("jaxgen")})


async def metrics(serving: Serving, request: Request) -> Response:
    """Prometheus' text format."""
    return Response(serving.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def openapi(serving: Serving, request: Request) -> Response:
    """This document."""
    return JSONAnswer(request.app.state.openapi())


async def status_page(serving: Serving, request: Request) -> Response:
    """A page for people, that needs nothing from elsewhere."""
    return HTMLResponse(STATUS_PAGE.read_text(encoding="utf-8"))


async def status(serving: Serving, request: Request) -> Response:
    """The page's numbers; rates are the page's own differences."""
    stats, wrong = serving.engine.stats(), serving.whats_wrong()
    return JSONAnswer(
        {
            "models": list(serving.names),
            "version": version("jaxgen"),
            "state": wrong or ("stopping" if serving.draining else "ready"),
            "uptime_seconds": int(time.time()) - _STARTED,
            "max_model_len": serving.engine.max_context,
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_used_blocks": stats.kv_used_blocks,
            "kv_total_blocks": stats.kv_total_blocks,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "prefix_hits": stats.prefix_hits,
            "prefix_queries": stats.prefix_queries,
            "preemptions": stats.preemptions,
            "steps": stats.steps,
            "late_compiles": stats.late_compiles,
            "last_step_seconds": stats.last_step_seconds,
        }
    )


def _card(serving: Serving, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "jaxgen",
        "root": serving.engine.model_name,
        "parent": None,
        "max_model_len": serving.engine.max_context,
    }
