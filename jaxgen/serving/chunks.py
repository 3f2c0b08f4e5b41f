"""Chunks of a stream, put together from JSON that was written once for the whole stream.

A chunk costs one JSON string, the new text; everything else is bytes that are there already.
"""

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from jaxgen.serving.connection import DONE
from jaxgen.serving.usage import usage_json

_END = "}\n\n"


class Envelope:
    """What all chunks of one response share: `data: {...,"choices":[` and what closes it.

    With `continuous` every chunk tells the usage so far, with `usage` only the last one does.
    """

    def __init__(
        self,
        kind: str,
        response_id: str,
        model: str,
        created: int,
        *,
        usage: bool,
        continuous: bool,
    ) -> None:
        shared = {"id": response_id, "object": kind, "created": created, "model": model}
        self.head = f'data: {json.dumps(shared)[:-1]}, "choices":['
        self._usage = usage
        self._continuous = continuous
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0

    @property
    def tail(self) -> str:
        """Closes the choices and the chunk."""
        if self._continuous:
            return f'],"usage":{self._usage_json()}}}\n\n'
        return '],"usage":null}\n\n' if self._usage else "]}\n\n"

    def end(self) -> bytes:
        """The chunk of usage, if it was asked for, and the end of the stream."""
        if not self._usage:
            return DONE
        return f'{self.head}],"usage":{self._usage_json()}}}\n\n'.encode() + DONE

    def _usage_json(self) -> str:
        return usage_json(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


def beside_choices(chunk: str, **members: object) -> str:
    """The chunk with further members."""
    return f"{chunk.removesuffix(_END)},{json.dumps(members)[1:-1]}{_END}"


class CompletionChunk:
    """Chunks of /v1/completions."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._heads: dict[int, str] = {}

    def text(self, index: int, text: str, more: str = "") -> str:
        """A piece of a choice's text. more: further members as JSON, each with a comma before."""
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = f'{self._envelope.head}{{"index":{index},"text":'
        ending = more or ',"logprobs":null,"finish_reason":null,"stop_reason":null'
        return f"{head}{quoted(text)}{ending}}}{self._envelope.tail}"


class ChatChunk:
    """Chunks of /v1/chat/completions."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._heads: dict[int, str] = {}

    def text(self, index: int, text: str, logprobs: str = "null") -> str:
        """A piece of a choice's content."""
        return f'{self._head(index)}{{"content":{quoted(text)}}}{self._tail(logprobs)}'

    def delta(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: str = "null",
        more: Mapping[str, object] | None = None,
    ) -> str:
        """Any other change: the role, reasoning, a tool call. more: the choice's other members."""
        members = "," + json.dumps(more)[1:-1] if more else ""
        return f"{self._head(index)}{json.dumps(delta)}{members}{self._tail(logprobs)}"

    def finish(self, index: int, reason: str, **more: object) -> str:
        """The choice's end, whose delta is empty. more: its other members."""
        ending = f'{{}},"logprobs":null,"finish_reason":{json.dumps(reason)}'
        return f"{self._head(index)}{ending},{json.dumps(more)[1:-1]}}}{self._envelope.tail}"

    def _head(self, index: int) -> str:
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = f'{self._envelope.head}{{"index":{index},"delta":'
        return head

    def _tail(self, logprobs: str) -> str:
        return f',"logprobs":{logprobs},"finish_reason":null}}{self._envelope.tail}'
