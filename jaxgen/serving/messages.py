"""Messages as OpenAI's clients send them become what chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgen.serving.errors import ApiError, bad_request

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Text parts are joined by line breaks, arguments of earlier calls become objects.

    ApiError 400 naming the message for roles that are none, and for parts that are not text.
    """
    return [_message(message, place) for place, message in enumerate(messages)]


def text_of(content: object, place: str) -> str | None:
    """The text of a message's content: a string, or parts of type text. ApiError otherwise.

    place: the field of the request, and where in it, with dots between.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(place, "content must be text or a list of parts")
    return "\n".join(_part(part, place) for part in content)


def content_of(message: Mapping[str, Any], place: str) -> str:
    """The text of a message, which only an assistant may leave out, or one who calls a tool."""
    content = text_of(message.get("content"), place)
    if content is None and not message.get("tool_calls") and message.get("role") != "assistant":
        raise _wrong(place, "content is missing")
    return content or ""


def role_of(message: Mapping[str, Any], place: str) -> str:
    """Who speaks. ApiError if nobody does."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(place, "role must be text, such as user or assistant")
    return role


def _wrong(place: str, what: str) -> ApiError:
    return bad_request(f"{place}.{what}", place.partition(".")[0])


def _message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    where = f"messages.{place}"
    role_of(message, where)
    read = {key: value for key, value in message.items() if value is not None}
    content = content_of(message, where)
    calls = message.get("tool_calls")
    read["content"] = content
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
        raise _wrong(place, f"content has a part of type {kind!r}: only text is understood here")
    return text


def _calls(calls: object, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(place, "tool_calls must be a list")
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _wrong(place, "tool_calls need a function with a name")
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
