"""/v1/completions: text goes on where the prompts end."""

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxgen.engine.outputs import TokenLogprob
from jaxgen.serving.chunks import CompletionChunk, Envelope
from jaxgen.serving.connection import EventStream, JSONAnswer, while_connected
from jaxgen.serving.context import Serving
from jaxgen.serving.deltas import CompletionDelta, RequestDelta
from jaxgen.serving.generation import Answered, Grown, Work, collect, deltas
from jaxgen.serving.logprobs import CompletionLogprobs, TokenNames, prompt_logprobs
from jaxgen.serving.prompts import Prompt, check_room, fitted, read_prompts
from jaxgen.serving.protocol.completion import DEFAULT_MAX_TOKENS, CompletionRequest
from jaxgen.serving.stops import matched_stop
from jaxgen.serving.usage import usage


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that was understood. just_echo: max_tokens is 0, and nothing new is wanted."""

    body: CompletionRequest
    work: Work
    model: str
    created: int
    names: TokenNames
    just_echo: bool


async def completions(serving: Serving, request: Request, body: CompletionRequest) -> Response:
    """Answers at once, or as a stream."""
    asked = await _understand(serving, request, body)
    if body.stream:
        pieces = _stream(serving, asked)
        return EventStream(pieces, stalled_seconds=serving.settings.stalled_seconds)
    results = await while_connected(request.receive, collect(serving, asked.work))
    return JSONAnswer(_answer(asked, results))


async def _understand(serving: Serving, request: Request, body: CompletionRequest) -> _Asked:
    model = serving.check_model(body.model)
    body.check_supported()
    just_echo = bool(body.echo) and body.max_tokens == 0
    given = "max_tokens" in body.model_fields_set and body.max_tokens is not None
    usual = serving.settings.sampling_defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
    wanted = body.max_tokens if given else usual
    settled: dict[str, Any] = {"max_tokens": 1 if just_echo else wanted}
    if body.logprobs is not None:
        settled["logprobs"] = body.logprobs
        if body.echo:
            settled["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    params = body.params(serving.settings.sampling_defaults, **settled)
    prompts = await read_prompts(
        serving,
        body.prompts(),
        params.n,
        add_special_tokens=body.add_special_tokens,
        keep=body.truncate_prompt_tokens,
        keep_first=body.truncation_side == "right",
        room=params.max_tokens,
    )
    if not given:
        params = fitted(serving, prompts, params)
    for prompt in prompts:
        check_room(serving, prompt, params)
    public_id = f"cmpl-{body.request_id or request.state.request_id}"
    return _Asked(
        body=body,
        work=Work(public_id, prompts, params, body.priority, body.cache_salt),
        model=model,
        created=int(time.time()),
        names=serving.token_names(as_ids=body.return_tokens_as_token_ids),
        just_echo=just_echo,
    )


def _answer(asked: _Asked, results: list[Answered]) -> dict[str, Any]:
    prompts = asked.work.prompts
    choices = []
    for prompt, result in zip(prompts, results, strict=True):
        for grown in result.completions:
            choices.append(_choice(asked, prompt, result, grown, len(choices)))
    return {
        "id": asked.work.public_id,
        "object": "text_completion",
        "created": asked.created,
        "model": asked.model,
        "choices": choices,
        "usage": usage(
            sum(len(prompt.ids) for prompt in prompts),
            0 if asked.just_echo else sum(result.generated for result in results),
            sum(result.cached_tokens for result in results),
        ),
    }


def _choice(
    asked: _Asked, prompt: Prompt, result: Answered, grown: Grown, index: int
) -> dict[str, Any]:
    body = asked.body
    token_ids = [] if asked.just_echo else grown.token_ids
    text = "" if asked.just_echo else grown.text
    choice: dict[str, Any] = {
        "index": index,
        "text": _prompt_text(asked, prompt) + text if body.echo else text,
        "logprobs": None,
        "finish_reason": "length" if asked.just_echo else grown.finish_reason,
        "stop_reason": grown.stop_reason,
        "matched_stop": None if asked.just_echo else matched_stop(asked.names.tokenizer, grown),
        **dict.fromkeys(("prompt_logprobs", "token_ids", "prompt_token_ids")),
    }
    if body.logprobs is not None:
        entries: list[TokenLogprob | None] = [*(grown.logprobs or [])[: len(token_ids)]]
        ids = token_ids
        if body.echo:
            entries = [*(result.prompt_logprobs or []), *entries]
            ids = [*prompt.ids, *ids]
        rendered = _logprobs_of(asked).render(ids, entries, body.logprobs)
        choice["logprobs"] = rendered
    if body.prompt_logprobs is not None and result.prompt_logprobs is not None:
        told = prompt_logprobs(asked.names, result.prompt_logprobs, body.prompt_logprobs)
        choice["prompt_logprobs"] = told
    if body.return_token_ids:
        choice["token_ids"] = token_ids
        choice["prompt_token_ids"] = prompt.ids
    return choice


def _prompt_text(asked: _Asked, prompt: Prompt) -> str:
    """The prompt as it was sent, or as its ids read."""
    if prompt.text is not None or asked.names.tokenizer is None:
        return prompt.text or ""
    return asked.names.tokenizer.decode(prompt.ids, skip_special_tokens=True)


def _logprobs_of(asked: _Asked) -> CompletionLogprobs:
    return CompletionLogprobs(
        asked.names,
        skip_special_tokens=asked.work.params.skip_special_tokens,
        continues_text=not asked.body.echo,
    )


async def _stream(serving: Serving, asked: _Asked) -> AsyncGenerator[bytes]:
    body, n = asked.body, asked.work.params.n
    envelope = Envelope(
        "text_completion",
        asked.work.public_id,
        asked.model,
        asked.created,
        usage=body.include_usage or serving.settings.force_usage,
        continuous=body.continuous_usage,
    )
    chunk, prompts = CompletionChunk(envelope), asked.work.prompts
    logprobs: dict[int, CompletionLogprobs] = {}
    begun: set[int] = set()
    plain = body.logprobs is None and not body.return_token_ids
    textless = asked.names.tokenizer is None  # then every token is news, though it has no text
    async with aclosing(deltas(serving, asked.work)) as stream:
        async for place, delta in stream:
            pieces = []
            if delta.prompt_token_ids:
                envelope.prompt_tokens += len(delta.prompt_token_ids)
                envelope.cached_tokens += delta.cached_tokens
                if body.echo:
                    text = _prompt_text(asked, prompts[place])
                    for index in range(place * n, place * n + n):
                        writer = logprobs.setdefault(index, _logprobs_of(asked))
                        pieces.append(chunk.text(index, text, _echoed(asked, delta, writer)))
                        begun.add(index)
            for completion in delta.completions:
                if asked.just_echo:
                    completion = _nothing_of(completion)
                envelope.completion_tokens += len(completion.token_ids)
                index = place * n + completion.index
                if plain and completion.finish_reason is None:
                    if completion.text or textless:
                        pieces.append(chunk.text(index, completion.text))
                    continue
                writer = logprobs.get(index) or logprobs.setdefault(index, _logprobs_of(asked))
                first = None if index in begun else prompts[place]
                begun.add(index)
                more = _members(asked, completion, writer, first)
                pieces.append(chunk.text(index, completion.text, more))
            if pieces:
                yield "".join(pieces).encode()
    yield envelope.end()


def _nothing_of(delta: CompletionDelta) -> CompletionDelta:
    """The end alone, of a continuation that nobody wants."""
    return CompletionDelta(delta.index, "", [], None, delta.finish_reason, delta.stop_reason, None)


def _echoed(asked: _Asked, delta: RequestDelta, writer: CompletionLogprobs) -> str:
    """What the chunk of an echoed prompt tells beside the prompt's text."""
    top, known, members = asked.body.logprobs, delta.prompt_logprobs, {}
    if top is not None and known is not None:
        members["logprobs"] = writer.render(delta.prompt_token_ids, known, top)
    if asked.body.return_token_ids:
        members |= {"prompt_token_ids": delta.prompt_token_ids, "token_ids": []}
    return _json({"logprobs": None, "finish_reason": None, "stop_reason": None} | members)


def _members(
    asked: _Asked, delta: CompletionDelta, writer: CompletionLogprobs, first: Prompt | None
) -> str:
    """What a chunk tells beside its text. first: the prompt, in the first chunk of a choice."""
    top, shown = asked.body.logprobs, None
    if top is not None and delta.logprobs:
        shown = writer.render(delta.token_ids, delta.logprobs, top)
    members: dict[str, Any] = {
        "logprobs": shown,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
    if delta.finish_reason is not None:
        members["matched_stop"] = matched_stop(asked.names.tokenizer, delta)
    if asked.body.return_token_ids:
        members["token_ids"] = delta.token_ids
        if first is not None:
            members["prompt_token_ids"] = first.ids
    return _json(members)


def _json(members: dict[str, Any]) -> str:
    return "," + json.dumps(members, allow_nan=False)[1:-1]
