"""/v1/chat/completions: a conversation is answered."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxgen.serving.chat_request import Chat, understand
from jaxgen.serving.chunks import ChatChunk, Envelope, beside_choices
from jaxgen.serving.connection import EventStream, JSONAnswer, while_connected
from jaxgen.serving.context import Serving
from jaxgen.serving.deltas import CompletionDelta
from jaxgen.serving.generation import Answered, Grown, collect, deltas
from jaxgen.serving.logprobs import chat_logprobs, prompt_logprobs
from jaxgen.serving.parsers import Event, ToolCall
from jaxgen.serving.protocol.chat import ChatRequest
from jaxgen.serving.stops import matched_stop
from jaxgen.serving.tools import TextParser
from jaxgen.serving.usage import usage
from jaxgen.serving.voice import Message, delta_of, finish_reason, read_whole


async def chat_completions(serving: Serving, request: Request, body: ChatRequest) -> Response:
    """Answers at once, or as a stream."""
    public_id = f"chatcmpl-{body.request_id or request.state.request_id}"
    chat = await understand(serving, public_id, body)
    if body.stream:
        pieces = _stream(serving, chat)
        return EventStream(pieces, stalled_seconds=serving.settings.stalled_seconds)
    (result,) = await while_connected(request.receive, collect(serving, chat.work))
    return JSONAnswer(_answer(chat, result))


def _answer(chat: Chat, result: Answered) -> dict[str, Any]:
    prompt = chat.work.prompts[0]
    answer: dict[str, Any] = {
        "id": chat.work.public_id,
        "object": "chat.completion",
        "created": chat.created,
        "model": chat.model,
        "choices": [_choice(chat, grown, i) for i, grown in enumerate(result.completions)],
        "usage": usage(len(prompt.ids), result.generated, result.cached_tokens),
        "prompt_logprobs": None,
        "prompt_token_ids": prompt.ids if chat.body.return_token_ids else None,
    }
    if chat.body.prompt_logprobs is not None and result.prompt_logprobs is not None:
        count = chat.body.prompt_logprobs
        answer["prompt_logprobs"] = prompt_logprobs(chat.names, result.prompt_logprobs, count)
    return answer


def _choice(chat: Chat, grown: Grown, index: int) -> dict[str, Any]:
    body = chat.body
    message = (
        Message([grown.text]) if chat.parser is None else read_whole(chat.parser(), grown.text)
    )
    if chat.opening:
        message.content.insert(0, chat.opening)
    entries = grown.logprobs or []
    top = body.top_logprobs or 0
    return {
        "index": index,
        "message": message.rendered(chat.role, reasoning=body.include_reasoning),
        "logprobs": {"content": chat_logprobs(chat.names, entries, top)} if body.logprobs else None,
        "finish_reason": finish_reason(
            str(grown.finish_reason), calls=bool(message.calls), named=chat.forced
        ),
        "stop_reason": grown.stop_reason,
        "matched_stop": matched_stop(chat.names.tokenizer, grown),
        "token_ids": grown.token_ids if body.return_token_ids else None,
    }


async def _stream(serving: Serving, chat: Chat) -> AsyncGenerator[bytes]:
    envelope = Envelope(
        "chat.completion.chunk",
        chat.work.public_id,
        chat.model,
        chat.created,
        usage=chat.body.include_usage or serving.settings.force_usage,
        continuous=chat.body.continuous_usage,
    )
    chunk = ChatChunk(envelope)
    n = chat.work.params.n
    writers = [_ChoiceWriter(chat, chunk, index) for index in range(n)]
    plain = chat.parser is None and not chat.body.logprobs and not chat.body.return_token_ids
    async with aclosing(deltas(serving, chat.work)) as stream:
        async for _, delta in stream:
            pieces = []
            if delta.prompt_token_ids:
                envelope.prompt_tokens = len(delta.prompt_token_ids)
                envelope.cached_tokens = delta.cached_tokens
                start = {"role": chat.role, "content": chat.opening}
                pieces += [chunk.delta(index, start) for index in range(n)]
                if chat.body.return_token_ids:
                    ids = delta.prompt_token_ids
                    pieces[0] = beside_choices(pieces[0], prompt_token_ids=ids)
            for completion in delta.completions:
                envelope.completion_tokens += len(completion.token_ids)
                if plain and completion.finish_reason is None:
                    if completion.text:
                        pieces.append(chunk.text(completion.index, completion.text))
                else:
                    pieces += writers[completion.index].chunks(completion)
            if pieces:
                yield "".join(pieces).encode()
    yield envelope.end()


class _ChoiceWriter:
    """Chunks of one choice, where they are more than text."""

    def __init__(self, chat: Chat, chunk: ChatChunk, index: int) -> None:
        self._chat = chat
        self._chunk = chunk
        self._index = index
        self._parser: TextParser | None = None if chat.parser is None else chat.parser()
        self._called = False
        self._unsaid: list[dict[str, Any]] = []

    def chunks(self, delta: CompletionDelta) -> list[str]:
        """What one delta is told as. Logprobs go with the first chunk that follows their tokens."""
        if self._chat.body.logprobs and delta.logprobs:
            top = self._chat.body.top_logprobs or 0
            self._unsaid += chat_logprobs(self._chat.names, delta.logprobs, top)
        changes = self._changes(delta)
        ended = delta.finish_reason is not None
        if not changes and ((self._unsaid and ended) or self._chat.body.return_token_ids):
            changes = [{"content": ""}]
        pieces = []
        more = {"token_ids": delta.token_ids} if self._chat.body.return_token_ids else {}
        for change in changes:
            pieces.append(self._chunk.delta(self._index, change, self._logprobs(), more))
            more = {}
        if ended:
            reason = finish_reason(
                str(delta.finish_reason), calls=self._called, named=self._chat.forced
            )
            matched = matched_stop(self._chat.names.tokenizer, delta)
            ending = {"stop_reason": delta.stop_reason, "matched_stop": matched}
            pieces.append(self._chunk.finish(self._index, reason, **ending))
        return pieces

    def _changes(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        if self._parser is None:
            return [{"content": delta.text}] if delta.text else []
        events: list[Event] = self._parser.push(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            events = [*events, *self._parser.finish()]
        self._called = self._called or any(isinstance(event, ToolCall) for event in events)
        told = [delta_of(event, reasoning=self._chat.body.include_reasoning) for event in events]
        return [change for change in told if change is not None]

    def _logprobs(self) -> str:
        if not self._unsaid:
            return "null"
        said, self._unsaid = self._unsaid, []
        return json.dumps({"content": said}, allow_nan=False)
