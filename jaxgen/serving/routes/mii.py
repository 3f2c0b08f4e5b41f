"""DeepSpeed-MII's route: prompts in, Responses out, under the deployment's name."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response as HTTPResponse

from jaxgen.pipelines import GenerateParams, Response, read_params
from jaxgen.serving.connection import DONE, EventStream, JSONAnswer, while_connected
from jaxgen.serving.context import Serving
from jaxgen.serving.errors import bad_request
from jaxgen.serving.generation import Answered, Grown, Work, collect, deltas, grow
from jaxgen.serving.prompts import Prompt, check_room, read_prompts
from jaxgen.serving.protocol.service import MIIRequest


async def mii(serving: Serving, request: Request, body: MIIRequest) -> HTTPResponse:
    """Answers every prompt; with `stream` one prompt's answer piece by piece."""
    serving.check_model(request.path_params["deployment"])
    texts = [body.prompts] if isinstance(body.prompts, str) else body.prompts
    params = read_params(body.model_extra or {})
    prompts = await read_prompts(serving, texts, field="prompts")
    work = [_work(serving, request, prompt, params) for prompt in prompts]
    if body.stream:
        if len(work) != 1:
            raise bad_request(f"one prompt can be streamed, {len(work)} were given", "prompts")
        pieces = _stream(serving, work[0], params)
        return EventStream(pieces, stalled_seconds=serving.settings.stalled_seconds)
    results = await while_connected(request.receive, _all(serving, work))
    pairs = zip(work, results, strict=True)
    return JSONAnswer([asdict(_response(each, result, params)) for each, result in pairs])


def _work(serving: Serving, request: Request, prompt: Prompt, params: GenerateParams) -> Work:
    sampling = params.sampling(len(prompt.ids))
    check_room(serving, prompt, sampling, field="prompts", limit="max_new_tokens")
    return Work(request.state.request_id, [prompt], sampling)


async def _all(serving: Serving, work: list[Work]) -> list[Answered]:
    """All answers; the first that fails ends the others."""
    tasks = [asyncio.create_task(collect(serving, each)) for each in work]
    try:
        return [result for (result,) in await asyncio.gather(*tasks)]
    finally:
        for task in tasks:
            task.cancel()


def _response(work: Work, result: Answered, params: GenerateParams) -> Response:
    (prompt,), (grown,) = work.prompts, result.completions
    return Response(
        generated_text=(prompt.text or "" if params.return_full_text else "") + grown.text,
        prompt_length=len(prompt.ids),
        generated_length=len(grown.token_ids),
        finish_reason=grown.finish_reason or "none",
    )


async def _stream(serving: Serving, work: Work, params: GenerateParams) -> AsyncGenerator[bytes]:
    """Each event is a Response with the text that is new; the prompt comes with the first."""
    first = params
    async with aclosing(deltas(serving, work)) as stream:
        async for _, delta in stream:
            piece = Answered(0, None, [Grown()])
            grow(piece, delta)
            yield f"data: {json.dumps(asdict(_response(work, piece, first)))}\n\n".encode()
            first = GenerateParams()
    yield DONE
