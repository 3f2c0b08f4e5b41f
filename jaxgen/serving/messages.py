"""Messages as OpenAI's clients send them become what chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgen.serving.errors import bad_request

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Text parts are joined by line breaks, arguments of earlier calls become objects.

    ApiError 400 naming the message for roles that are none, and for parts that are not text.
    """
    return [_message(message, place) for place, message in enumerate(messages)]


def text_of(content: object, place: str) -> str | None:
    """The text of a message's content: a string, or parts of type text. ApiError otherwise."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{place}.content must be text or a list of parts", "messages")
    return "\n".join(_part(part, place) for part in content)


def _message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    where = f"messages.{place}"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad_request(f"{where}.role must be text, such as user or assistant", "messages")
    read = {key: value for key, value in message.items() if value is not None}
    content = text_of(message.get("content"), where)
    calls = message.get("tool_calls")
    if content is None and not calls and role != "assistant":
        raise bad_request(f"{where}.content is missing", "messages")
    read["content"] = content or ""
    if calls:
        read["tool_calls"] = _calls(calls, where)
    return read


def _part(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    text = part.get(name) if isinstance(part, Mapping) and name is not None else None
    if not isinstance(text, str):
        message = f"{place}.content has a part of type {kind!r}: only text is understood here"
        raise bad_request(message, "messages")
    return text


def _calls(calls: object, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_request(f"{place}.tool_calls must be a list", "messages")
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise bad_request(f"{place}.tool_calls need a function with a name", "messages")
        arguments = function.get("arguments")
        read.append({**call, "function": {**function, "arguments": _object(arguments)}})
    return read


def _object(arguments: object) -> object:
    """Arguments as the object that they spell, which is what templates write out."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments else {}
    except ValueError:
        return arguments
