"""Commands to the engine, and what it says of itself, by SGLang's names and vLLM's."""

from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxgen.sampling import InvalidParameter, SamplingParams
from jaxgen.serving.connection import JSONAnswer, while_connected
from jaxgen.serving.context import Serving
from jaxgen.serving.generation import Work, collect
from jaxgen.serving.prompts import Prompt
from jaxgen.serving.protocol.service import AbortRequest

_SUCCESS = {"success": True}


async def flush_cache(serving: Serving, request: Request) -> Response:
    """Forgets every prefix that is cached."""
    serving.need_engine()
    await serving.engine.reset_prefix_cache()
    return JSONAnswer(_SUCCESS)


async def abort_request(serving: Serving, request: Request, body: AbortRequest) -> Response:
    """Ends the request with this rid, or all of them."""
    if not body.rid and not body.abort_all:
        raise InvalidParameter("rid", "or abort_all must be given")
    serving.need_engine()
    await serving.abort(None if body.abort_all else body.rid)
    return JSONAnswer(_SUCCESS)


async def health_generate(serving: Serving, request: Request) -> Response:
    """200 when a token could be generated just now; that waits its turn like any request."""
    prompt = Prompt([0], None)
    work = Work(request.state.request_id, [prompt], SamplingParams(max_tokens=1, temperature=0))
    await while_connected(request.receive, collect(serving, work))
    return JSONAnswer({"status": "ok"})


async def server_info(serving: Serving, request: Request) -> Response:
    """The model and the load, by SGLang's names."""
    stats = serving.engine.stats()
    return JSONAnswer(
        {
            **_info(serving),
            "version": version("jaxgen"),
            "internal_states": [{"running": stats.running, "waiting": stats.waiting}],
        }
    )


async def model_info(serving: Serving, request: Request) -> Response:
    """What is served, by SGLang's names."""
    return JSONAnswer(_info(serving))


def _info(serving: Serving) -> dict[str, Any]:
    return {
        "model_path": serving.engine.model_name,
        "tokenizer_path": serving.engine.model_name,
        "is_generation": True,
        "max_context_length": serving.engine.max_context,
        "served_model_name": serving.names[0],
        "preferred_sampling_params": dict(serving.settings.sampling_defaults),
    }
