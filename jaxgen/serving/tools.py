"""Tools: what must be written for a call that is required, and how a model's text is read."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from jaxgen.sampling import InvalidParameter
from jaxgen.serving.parsers.call_json import CallWriter, call_object
from jaxgen.serving.parsers.events import Arguments, Event, Reasoning, Text, ToolCall
from jaxgen.serving.parsers.reading import Reader, ReadingParser, next_visible
from jaxgen.serving.protocol.chat import ChatTool

_ANYTHING = {"type": "object"}
_DEFINITIONS = ("$defs", "definitions")


class TextParser(Protocol):
    """Reads a choice's text as it grows: parsers of models, and those of this file."""

    def push(self, text: str) -> list[Event]:
        """What is certain now that `text` has come."""
        ...

    def finish(self) -> list[Event]:
        """All that was held back."""
        ...


def new_call_id() -> str:
    """An id for a call, unlike any other."""
    return f"call_{uuid.uuid4().hex[:24]}"


def required_schema(tools: Sequence[ChatTool], *, one: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls of these tools; one: exactly one call."""
    calls = []
    shared: dict[str, dict[str, Any]] = {}
    for tool in tools:
        parameters: dict[str, Any] = dict(tool.function.parameters or _ANYTHING)
        for place in _DEFINITIONS:  # references to them begin at the root
            if place in parameters:
                _share(shared.setdefault(place, {}), parameters.pop(place), place)
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [tool.function.name]},
                    "parameters": parameters,
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if one:
        schema["maxItems"] = 1
    return schema | shared


def _share(known: dict[str, Any], added: object, place: str) -> None:
    """Adds definitions; InvalidParameter for two of one name that differ."""
    if not isinstance(added, Mapping):
        raise InvalidParameter("tools", f"hold {place} that are no object: {added!r}")
    for name, definition in added.items():
        if known.setdefault(name, definition) != definition:
            raise InvalidParameter("tools", f"define {name!r} in their {place} in different ways")


def named_schema(tools: Sequence[ChatTool], name: str) -> dict[str, Any]:
    """The JSON schema of the arguments of the tool called `name`."""
    (tool, *_) = [tool for tool in tools if tool.function.name == name]
    return tool.function.parameters or _ANYTHING


class RequiredCalls(ReadingParser):
    """Reads the list of calls that required_schema describes."""

    def _read(self) -> Reader[None]:
        index = 0
        while True:
            if (yield from next_visible()) == "{":
                yield from call_object(CallWriter(index, self._tell))
                index += 1


class NamedCall:
    """The whole text is the arguments of one call."""

    needs_special_tokens: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self._begin: list[Event] = [ToolCall(0, name)]

    def push(self, text: str) -> list[Event]:
        """The call begins with its first piece."""
        begin, self._begin = self._begin, []
        return [*begin, Arguments(0, text)]

    def finish(self) -> list[Event]:
        """Nothing was held back."""
        return []


class FirstCall:
    """Another parser without the calls after the first."""

    def __init__(self, parser: TextParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Event]:
        """What is certain now that `text` has come."""
        return self._wanted(self._parser.push(text))

    def finish(self) -> list[Event]:
        """All that was held back."""
        return self._wanted(self._parser.finish())

    def _wanted(self, events: Sequence[Event]) -> list[Event]:
        kinds = (Text, Reasoning)
        return [event for event in events if isinstance(event, kinds) or event.index == 0]
