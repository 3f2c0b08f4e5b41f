"""/v1/responses: a conversation is answered, and nothing of it is kept."""

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxgen.sampling import InvalidParameter
from jaxgen.serving.chat_request import Chat, understand
from jaxgen.serving.connection import EventStream, JSONAnswer, while_connected
from jaxgen.serving.context import Serving
from jaxgen.serving.generation import collect, deltas
from jaxgen.serving.parsers import Event, Text
from jaxgen.serving.protocol.responses import ResponsesRequest
from jaxgen.serving.response_items import Items
from jaxgen.serving.tools import TextParser


async def responses(serving: Serving, request: Request, body: ResponsesRequest) -> Response:
    """Answers at once, or as a stream of typed events."""
    public_id = f"resp_{request.state.request_id}"
    known_as = {"field": "input", "limit": "max_output_tokens"}
    chat = await understand(serving, public_id, body.as_chat(), **known_as)
    if chat.work.params.n > 1:
        raise InvalidParameter("n", "must be 1 here: a response is one answer")
    answer = _Answer(chat, body)
    if body.stream:
        pieces = _stream(serving, chat, answer)
        return EventStream(pieces, stalled_seconds=serving.settings.stalled_seconds)
    (result,) = await while_connected(request.receive, collect(serving, chat.work))
    grown = result.completions[0]
    items = Items()
    for event in _read(chat.parser() if chat.parser else None, grown.text, last=True):
        items.take(event)
    items.close()
    counted = (len(chat.work.prompts[0].ids), result.cached_tokens, result.generated)
    return JSONAnswer(answer.rendered(items.done, grown.finish_reason, counted))


class _Answer:
    """The response object at any time of its growth."""

    def __init__(self, chat: Chat, body: ResponsesRequest) -> None:
        params = chat.work.params
        self._fixed: dict[str, Any] = {
            "id": chat.work.public_id,
            "object": "response",
            "created_at": float(int(time.time())),
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": chat.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def rendered(
        self,
        output: list[dict[str, Any]],
        finish_reason: str | None = None,
        counted: tuple[int, int, int] | None = None,
    ) -> dict[str, Any]:
        """finish_reason: None while it grows. counted: tokens read, of these cached, written."""
        cut = finish_reason == "length"
        status = "incomplete" if cut else "completed"
        return {
            **self._fixed,
            "status": "in_progress" if finish_reason is None else status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": None if counted is None else _usage(*counted),
        }


def _usage(read: int, cached: int, written: int) -> dict[str, Any]:
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }


def _read(parser: TextParser | None, text: str, *, last: bool) -> list[Event]:
    if parser is None:
        return [Text(text)] if text else []
    events = parser.push(text) if text else []
    return [*events, *parser.finish()] if last else events


async def _stream(serving: Serving, chat: Chat, answer: _Answer) -> AsyncGenerator[bytes]:
    parser = None if chat.parser is None else chat.parser()
    items, events = Items(), _Events()
    read = cached = written = 0
    async with aclosing(deltas(serving, chat.work)) as stream:
        async for _, delta in stream:
            pieces = []
            if delta.prompt_token_ids:
                read, cached = len(delta.prompt_token_ids), delta.cached_tokens
                for kind in ("response.created", "response.in_progress"):
                    pieces.append(events.render(kind, {"response": answer.rendered([])}))
            for completion in delta.completions:
                written += len(completion.token_ids)
                reason = completion.finish_reason
                for event in _read(parser, completion.text, last=reason is not None):
                    pieces += [events.render(*told) for told in items.take(event)]
                if reason is None:
                    continue
                pieces += [events.render(*told) for told in items.close()]
                counted = (read, cached, written)
                whole = answer.rendered(items.done, str(reason), counted)
                kind = "response.incomplete" if reason == "length" else "response.completed"
                pieces.append(events.render(kind, {"response": whole}))
            if pieces:
                yield b"".join(pieces)


class _Events:
    """Numbers events, and writes them as server-sent events with a name."""

    def __init__(self) -> None:
        self._number = 0

    def render(self, kind: str, members: dict[str, Any]) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **members}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(body)}\n\n".encode()
