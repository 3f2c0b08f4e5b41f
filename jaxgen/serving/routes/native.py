"""SGLang's own routes: /generate with its parameter names, and its commands."""

import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxgen.sampling import InvalidParameter, SamplingParams
from jaxgen.serving.connection import DONE, EventStream, JSONAnswer, while_connected
from jaxgen.serving.context import Serving
from jaxgen.serving.generation import Answered, Grown, Work, collect, deltas, grow
from jaxgen.serving.logprobs import finite
from jaxgen.serving.prompts import Prompt, check_room, read_prompt
from jaxgen.serving.protocol.service import AbortRequest, GenerateRequest

_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
_STRUCTURES = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


@dataclass(frozen=True, slots=True)
class _Asked:
    body: GenerateRequest
    work: Work
    several: bool
    began: float


async def generate(serving: Serving, request: Request, body: GenerateRequest) -> Response:
    """Answers at once, or as a stream whose texts are whole so far."""
    asked = await _understand(serving, request, body)
    if body.stream:
        pieces = _stream(serving, asked)
        return EventStream(pieces, stalled_seconds=serving.settings.stalled_seconds)
    results = await while_connected(request.receive, collect(serving, asked.work))
    answers = [
        _answer(asked, place, result, grown)
        for place, result in enumerate(results)
        for grown in result.completions
    ]
    return JSONAnswer(answers if asked.several else answers[0])


async def flush_cache(serving: Serving, request: Request) -> Response:
    """Forgets every prefix that is cached."""
    await serving.engine.reset_prefix_cache()
    return JSONAnswer({"success": True})


async def abort_request(serving: Serving, request: Request, body: AbortRequest) -> Response:
    """Ends the request with this rid, or all of them."""
    if not body.rid and not body.abort_all:
        raise InvalidParameter("rid", "or abort_all must be given")
    await serving.abort(None if body.abort_all else body.rid)
    return JSONAnswer({"success": True})


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


async def _understand(serving: Serving, request: Request, body: GenerateRequest) -> _Asked:
    given = body.text if body.text is not None else body.input_ids
    assert given is not None
    several = not isinstance(given, str) and not (given and isinstance(given[0], int))
    prompts: list[Any] = list(given) if several else [given]
    if not prompts:
        raise InvalidParameter("text", "must not be empty")
    sampling = _single("sampling_params", body.sampling_params) or {}
    params = _params(serving, body, sampling)
    read = [await read_prompt(serving, prompt) for prompt in prompts]
    for prompt in read:
        check_room(serving, prompt, params)
    rid = _single("rid", body.rid) or request.state.request_id
    return _Asked(
        body=body,
        work=Work(rid, read, params),
        several=several or params.n > 1,
        began=time.monotonic(),
    )


def _single(name: str, value: Any) -> Any:  # noqa: ANN401
    """The one value for all prompts."""
    if not isinstance(value, list):
        return value
    if any(entry != value[0] for entry in value):
        raise InvalidParameter(name, "must be the same for all prompts of one request")
    return value[0] if value else None


def _params(serving: Serving, body: GenerateRequest, given: Mapping[str, Any]) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": 128, **serving.settings.sampling_defaults}
    for name, value in given.items():
        if value is None:
            continue
        if name in _STRUCTURES:
            schema = (
                json.loads(value) if name == "json_schema" and isinstance(value, str) else value
            )
            values["structured_outputs"] = {_STRUCTURES[name]: schema}
        else:
            values[_RENAMED.get(name, name)] = value
    if _single("return_logprob", body.return_logprob):
        top = _single("top_logprobs_num", body.top_logprobs_num) or 0
        values["logprobs"] = top
        if (_single("logprob_start_len", body.logprob_start_len) or 0) >= 0:
            values["prompt_logprobs"] = top
    return SamplingParams.from_mapping(values)


def _answer(asked: _Asked, place: int, result: Answered, grown: Grown) -> dict[str, Any]:
    prompt = asked.work.prompts[place]
    meta: dict[str, Any] = {
        "id": asked.work.public_id,
        "finish_reason": _finish_reason(grown),
        "prompt_tokens": len(prompt.ids),
        "completion_tokens": len(grown.token_ids),
        "cached_tokens": result.cached_tokens,
        "e2e_latency": time.monotonic() - asked.began,
    }
    if asked.work.params.logprobs is not None:
        entries = grown.logprobs or []
        meta["output_token_logprobs"] = [_triple(e.token_id, e.logprob) for e in entries]
        meta["output_top_logprobs"] = [[_triple(*pair) for pair in e.top] for e in entries]
    if asked.work.params.prompt_logprobs is not None and result.prompt_logprobs is not None:
        start = _single("logprob_start_len", asked.body.logprob_start_len) or 0
        tail = list(zip(prompt.ids, result.prompt_logprobs, strict=True))[start:]
        meta["input_token_logprobs"] = [
            [None, token, None] if entry is None else _triple(entry.token_id, entry.logprob)
            for token, entry in tail
        ]
    return {"text": grown.text, "output_ids": grown.token_ids, "meta_info": meta}


def _finish_reason(grown: Grown) -> dict[str, Any] | None:
    if grown.finish_reason is None:
        return None
    if grown.finish_reason == "length":
        return {"type": "length", "length": len(grown.token_ids)}
    matched = grown.token_ids[-1] if grown.stop_reason is None else grown.stop_reason
    return {"type": grown.finish_reason, "matched": matched}


def _triple(token_id: int, logprob: float) -> list[Any]:
    return [finite(logprob), token_id, None]


async def _stream(serving: Serving, asked: _Asked) -> AsyncGenerator[bytes]:
    n = asked.work.params.n
    results = [Answered(0, None, [Grown() for _ in range(n)]) for _ in asked.work.prompts]
    async with aclosing(deltas(serving, asked.work)) as stream:
        async for place, delta in stream:
            result = results[place]
            grow(result, delta)
            pieces = []
            for completion in delta.completions:
                answer = _answer(asked, place, result, result.completions[completion.index])
                if asked.several:
                    answer["index"] = place * n + completion.index
                pieces.append(f"data: {json.dumps(answer, allow_nan=False)}\n\n")
            if pieces:
                yield "".join(pieces).encode()
    yield DONE
