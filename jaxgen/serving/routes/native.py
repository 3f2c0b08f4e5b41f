"""SGLang's /generate: whole answers, or streams whose texts are whole so far."""

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxgen.engine.outputs import TokenLogprob
from jaxgen.serving.connection import DONE, EventStream, JSONAnswer, while_connected
from jaxgen.serving.context import Serving
from jaxgen.serving.generation import Answered, Grown, collect, deltas, grow
from jaxgen.serving.logprobs import finite
from jaxgen.serving.protocol.service import GenerateRequest
from jaxgen.serving.routes.native_request import Asked, understand
from jaxgen.serving.stops import matched_stop


async def generate(serving: Serving, request: Request, body: GenerateRequest) -> Response:
    """Answers at once, or as a stream whose texts are whole so far."""
    asked = await understand(serving, request, body)
    if body.stream:
        pieces = _stream(serving, asked)
        return EventStream(pieces, stalled_seconds=serving.settings.stalled_seconds)
    results = await while_connected(request.receive, collect(serving, asked.work))
    answers = [
        _answer(serving, asked, place, result, grown)
        for place, result in enumerate(results)
        for grown in result.completions
    ]
    return JSONAnswer(answers if asked.several else answers[0])


def _answer(
    serving: Serving, asked: Asked, place: int, result: Answered, grown: Grown
) -> dict[str, Any]:
    prompt = asked.work.prompts[place]
    if asked.just_prompt:
        grown = Grown(finish_reason=grown.finish_reason and "length")
    meta: dict[str, Any] = {
        "id": asked.work.public_id,
        "finish_reason": _finish_reason(serving, grown),
        "prompt_tokens": len(prompt.ids),
        "completion_tokens": len(grown.token_ids),
        "cached_tokens": result.cached_tokens,
        "e2e_latency": time.monotonic() - asked.began,
    }
    if asked.work.params.logprobs is not None:
        meta |= _logprobs(asked, "output", grown.token_ids, grown.logprobs or [])
    if asked.work.params.prompt_logprobs is not None and result.prompt_logprobs is not None:
        start = asked.start
        meta |= _logprobs(asked, "input", prompt.ids[start:], result.prompt_logprobs[start:])
    return {"text": grown.text, "output_ids": grown.token_ids, "meta_info": meta}


def _finish_reason(serving: Serving, grown: Grown) -> dict[str, Any] | None:
    if grown.finish_reason is None:
        return None
    if grown.finish_reason == "length":
        return {"type": "length", "length": len(grown.token_ids)}
    return {
        "type": grown.finish_reason,
        "matched": matched_stop(serving.engine.tokenizer, grown),
    }


def _logprobs(
    asked: Asked,
    side: str,
    token_ids: list[int],
    entries: list[TokenLogprob | None] | list[TokenLogprob],
) -> dict[str, Any]:
    """Triples of logprob, id and text (null unless asked for); the first of a prompt has none."""

    def triple(token_id: int, logprob: float | None) -> list[Any]:
        text = None if asked.names is None else asked.names.name(token_id)
        return [None if logprob is None else finite(logprob), token_id, text]

    pairs = list(zip(token_ids, entries, strict=True))
    told: dict[str, Any] = {
        f"{side}_token_logprobs": [
            triple(token, None if entry is None else entry.logprob) for token, entry in pairs
        ]
    }
    if asked.work.params.logprobs:
        told[f"{side}_top_logprobs"] = [
            None if entry is None else [triple(*pair) for pair in entry.top] for _, entry in pairs
        ]
    return told


async def _stream(serving: Serving, asked: Asked) -> AsyncGenerator[bytes]:
    n = asked.work.params.n
    results = [Answered(0, None, [Grown() for _ in range(n)]) for _ in asked.work.prompts]
    async with aclosing(deltas(serving, asked.work)) as stream:
        async for place, delta in stream:
            result = results[place]
            grow(result, delta)
            pieces = []
            for completion in delta.completions:
                grown = result.completions[completion.index]
                answer = _answer(serving, asked, place, result, grown)
                if asked.several:
                    answer["index"] = place * n + completion.index
                pieces.append(f"data: {json.dumps(answer, allow_nan=False)}\n\n")
            if pieces:
                yield "".join(pieces).encode()
    yield DONE
