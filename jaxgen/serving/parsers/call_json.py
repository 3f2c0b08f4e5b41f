"""A call as JSON, {"name": ..., "arguments": {...}}: told while it is being written."""

import json
from collections.abc import Callable

from jaxgen.serving.parsers.events import Arguments, Event, ToolCall
from jaxgen.serving.parsers.reading import Reader, character, drop, next_visible, stretch

ARGUMENT_KEYS = ("arguments", "parameters")

_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}


class CallWriter:
    """Tells of one call: its name first, whatever the order in which its parts come."""

    def __init__(self, index: int, tell: Callable[[Event], None]) -> None:
        self.begun = False
        self._index = index
        self._tell = tell
        self._early: list[str] = []
        self._said = False

    def name(self, name: str) -> None:
        """The function's name."""
        self._tell(ToolCall(self._index, name))
        self.begun = True
        for piece in self._early:
            self.arguments(piece)

    def arguments(self, text: str) -> None:
        """A further piece of the arguments."""
        if self.begun:
            self._said = True
            self._tell(Arguments(self._index, text))
        else:
            self._early.append(text)

    def close(self) -> None:
        """The call is complete; without arguments it has an empty object."""
        if self.begun and not self._said:
            self.arguments("{}")


def call_object(call: CallWriter) -> Reader[bool]:
    """Reads an object from behind its "{" to its "}"; whether it was a call, as far as told.

    It stops, with False, at the character that makes it no JSON object.
    """
    while True:
        mark = yield from next_visible()
        if mark == "}":
            call.close()
            return call.begun
        if mark == ",":
            continue
        if mark != '"':
            return False
        key = yield from _string()
        if (yield from next_visible()) != ":":
            return False
        first = yield from next_visible()
        if first in ",:]}":
            return False
        if (yield from _member(key, first, call)):
            call.close()
            return call.begun


def _member(key: str | None, first: str, call: CallWriter) -> Reader[bool]:
    """Reads a value; whether the object's "}" was read with it, which is what ends a number."""
    if key in ARGUMENT_KEYS and first in "{[":
        call.arguments(first)
        yield from nested(call.arguments)
        return False
    if first == '"':
        text = yield from _string()
        if key == "name" and text is not None and not call.begun:
            call.name(text)
        elif key in ARGUMENT_KEYS and text is not None:
            call.arguments(text)
        return False
    if first in "{[":
        yield from nested(drop)
        return False
    while (mark := (yield from character())) not in ",}":
        pass
    return mark == "}"


def nested(emit: Callable[[str], None]) -> Reader[None]:
    """Emits an object or array, from behind its opening bracket to its closing one."""
    depth, quoted = 1, False
    while depth:
        mark = yield from stretch('"\\' if quoted else '"{}[]')
        emit(mark)
        if quoted and mark == "\\":
            emit((yield from character()))
        elif mark == '"':
            quoted = not quoted
        elif not quoted:
            depth += _BRACKETS.get(mark, 0)


def _string() -> Reader[str | None]:
    """A string from behind its opening quote; None if its escapes are wrong."""
    raw, mark = ['"'], ""
    while mark != '"':
        mark = yield from stretch('"\\')
        raw.append(mark)
        if mark == "\\":
            raw.append((yield from character()))
    try:
        text = json.loads("".join(raw), strict=False)
    except ValueError:
        return None
    return text if isinstance(text, str) else None
