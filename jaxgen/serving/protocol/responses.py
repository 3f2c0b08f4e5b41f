"""/v1/responses: request and answer, and the chat request that it amounts to."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from jaxgen.sampling import InvalidParameter
from jaxgen.serving.bodies import validated
from jaxgen.serving.errors import bad_request
from jaxgen.serving.messages import content_of, role_of, text_of
from jaxgen.serving.protocol.chat import ChatRequest
from jaxgen.serving.protocol.sampling import Number, Whole, refuse_fields
from jaxgen.serving.protocol.service import Answer, Body

_UNSUPPORTED = {
    "previous_response_id": "is not supported: no response is stored; send the whole conversation",
    "conversation": "is not supported: no response is stored; send the whole conversation",
    "background": "is not supported: the answer comes with the request",
    "prompt": "is not supported: no prompt is stored",
    "max_tool_calls": "is not supported",
    "include": "is not supported: a response has its text, its calls and its reasoning",
    "top_logprobs": "is not supported here: /v1/chat/completions has logprobs",
    "stream_options": "is not supported: a stream ends with its usage in any case",
}


class TextOptions(Body):
    """How the text is to be written; format is like {"type": "text"}."""

    format: dict[str, Any] | None = None


class ReasoningOptions(Body):
    """What the chat template is told of reasoning."""

    effort: str | None = None


class ResponsesRequest(Body):
    """A conversation as items."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(None, ge=1)
    temperature: Number | None = None
    top_p: Number | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = False
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None

    def as_chat(self) -> ChatRequest:
        """The same as a chat request. ApiError or InvalidParameter for what has no such form."""
        extra = self.model_extra or {}
        refuse_fields(extra, _UNSUPPORTED)
        if extra.get("truncation") not in (None, "disabled"):
            raise InvalidParameter("truncation", "is not supported: send what the context holds")
        asked: dict[str, Any] = {
            **extra,
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": _choice(self.tool_choice) if self.tools else None,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _format(self.text),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }
        return validated(ChatRequest, {k: v for k, v in asked.items() if v is not None})

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
            return messages
        for place, item in enumerate(self.input):
            _add_item(messages, item, f"input.{place}")
        if not messages:
            raise bad_request("input must not be empty", "input")
        return messages


class ResponseUsage(Answer):
    """Tokens that were read and written."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesAnswer(Answer):
    """The response; output holds reasoning, messages and function calls in their order."""

    id: str
    object: str = "response"
    created_at: float
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    """A message, a call that joins the assistant's message before it, or a call's result."""
    kind = item.get("type") or "message"
    if kind == "message":
        role, content = role_of(item, place), content_of(item, place)
        role = "system" if role == "developer" else role
        messages.append({"role": role, "content": content})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        if not isinstance(item.get("name"), str):
            raise bad_request(f"{place}.name must be text", "input")
        function = {"name": item["name"], "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        result = {"role": "tool", "tool_call_id": item.get("call_id")}
        messages.append({**result, "content": text_of(output, place) or ""})
    elif kind != "reasoning":  # what was thought before is not told again
        raise bad_request(f"{place} has type {kind!r}, which is not understood here", "input")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(f"tools of type {tool.get('type')!r} are not supported", "tools")
    kept = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
    return {"type": "function", "function": kept}


def _choice(choice: str | Mapping[str, Any] | None) -> object:
    if isinstance(choice, Mapping):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    """Chat's response_format: there the schema is one level deeper."""
    if text is None or text.format is None:
        return None
    if text.format.get("type") != "json_schema":
        return text.format
    return {"type": "json_schema", "json_schema": text.format}
