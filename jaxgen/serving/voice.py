"""How one chat choice is read: as content, or through parsers as reasoning, content and calls."""

from dataclasses import dataclass, field
from typing import Any

from jaxgen.serving.parsers import Event, Reasoning, Text, ToolCall
from jaxgen.serving.tools import TextParser, new_call_id


@dataclass(slots=True)
class Message:
    """A choice's message as it has grown."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Grows by one event."""
        match event:
            case Text(text):
                self.content.append(text)
            case Reasoning(text):
                self.reasoning.append(text)
            case ToolCall(_, name):
                function = {"name": name, "arguments": ""}
                self.calls.append({"id": new_call_id(), "type": "function", "function": function})
            case _:
                self.calls[event.index]["function"]["arguments"] += event.text

    def rendered(self, role: str, *, reasoning: bool) -> dict[str, Any]:
        """OpenAI's object. Content is null beside calls, where there is none."""
        content = "".join(self.content)
        thought = ("".join(self.reasoning) or None) if reasoning else None
        message: dict[str, Any] = {
            "role": role,
            "content": content,
            "refusal": None,
            "reasoning": thought,
            "reasoning_content": thought,
        }
        if self.calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = self.calls
        return message


def read_whole(parser: TextParser, text: str) -> Message:
    """The message that a finished text is."""
    message = Message()
    for event in (*parser.push(text), *parser.finish()):
        message.take(event)
    return message


def delta_of(event: Event, *, reasoning: bool) -> dict[str, Any] | None:
    """The `delta` of a chunk that tells of an event; None where reasoning is not wanted."""
    match event:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text, "reasoning_content": text} if reasoning else None
        case ToolCall(index, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": new_call_id(), "type": "function", "function": function}
            return {"tool_calls": [call]}
        case _:
            call = {"index": event.index, "function": {"arguments": event.text}}
            return {"tool_calls": [call]}


def finish_reason(reason: str, *, calls: bool, named: bool) -> str:
    """A choice that asks for calls says so, unless the client had named the one to make."""
    return "tool_calls" if calls and not named and reason == "stop" else reason
