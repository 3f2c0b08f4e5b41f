"""What `vllm bench serve` asks of OpenAI's two routes, and what a stream tells as it arrives."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from jaxgen.bench.workload import BenchRequest


class Backend(StrEnum):
    """Which of the two: /v1/completions, or /v1/chat/completions."""

    COMPLETIONS = "openai"
    CHAT = "openai-chat"

    @property
    def endpoint(self) -> str:
        """The route's usual path."""
        return "/v1/chat/completions" if self is Backend.CHAT else "/v1/completions"


def request_body(
    backend: Backend, request: BenchRequest, model: str, extra: dict[str, Any]
) -> dict[str, Any]:
    """A streamed request that tells its usage; extra: members that are added or replaced.

    A prompt goes as text where it has one, otherwise as token ids, which only COMPLETIONS takes.
    """
    shared = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if backend is Backend.CHAT:
        content = [{"type": "text", "text": request.text}]
        asked = {
            "messages": [{"role": "user", "content": content}],
            "max_completion_tokens": request.output_len,
        }
    else:
        prompt = request.prompt_ids if request.text is None else request.text
        asked = {"prompt": prompt, "max_tokens": request.output_len}
    return shared | asked | extra


@dataclass(slots=True)
class Told:
    """What has been read of one stream, and when; seconds are readings of time.perf_counter().

    first, last: arrival of the first and the last piece of output. gaps: seconds between pieces
    that follow each other. prompt_tokens, output_tokens: of `usage`, None where it never came.
    """

    first: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    _rest: bytes = b""

    def push(self, piece: bytes, now: float) -> None:
        """More of the event stream, in pieces of any size. ValueError for data that is no JSON."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data != b"[DONE]":
                    self._event(json.loads(data), now)

    def _event(self, event: dict[str, Any], now: float) -> None:
        if event.get("error") is not None:
            self.error = json.dumps(event["error"])
        if choices := event.get("choices"):
            text = _output(choices[0])
            if text is None and self.first is None and choices[0].get("finish_reason"):
                text = ""  # an answer without a word ends here, and has begun here
            if text is not None:
                self._mark(text, now)
        if usage := event.get("usage"):
            self.prompt_tokens = usage.get("prompt_tokens")
            self.output_tokens = usage.get("completion_tokens")

    def _mark(self, text: str, now: float) -> None:
        if self.first is None or self.last is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now
        self.text.append(text)


def _output(choice: dict[str, Any]) -> str | None:
    """A choice's new text, maybe empty; None for a chunk that only opens or closes a chat."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    texts = (delta.get(name) for name in ("reasoning", "reasoning_content", "content"))
    text = next((text for text in texts if text), "")
    return text if text or delta.get("tool_calls") else None
