"""Mistral's calls behind [TOOL_CALLS]: a list of JSON objects, or (from v11 on) name{arguments}."""

from typing import ClassVar

from jaxgen.serving.parsers.call_json import CallWriter, call_object, nested
from jaxgen.serving.parsers.reading import (
    Reader,
    copy_until,
    drop,
    next_visible,
    take_until,
)
from jaxgen.serving.parsers.tool_parser import ToolParser

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(ToolParser):
    """White space around calls is dropped."""

    needs_special_tokens: ClassVar[bool] = True

    def _read(self) -> Reader[None]:
        begun = ""
        while True:
            yield from copy_until((BEGIN,), self._say, begun)
            opening = yield from next_visible()
            if opening == "[":
                yield from self._list()
            else:
                yield from self._try_call(BEGIN + opening, lambda call, o=opening: _named(o, call))
            begun = yield from next_visible()

    def _list(self) -> Reader[None]:
        while True:
            mark = yield from next_visible()
            if mark == "{":
                yield from self._try_call("{", call_object)
            elif mark != ",":
                if mark != "]":
                    self._say(mark)
                return


def _named(opening: str, call: CallWriter) -> Reader[None]:
    name: list[str] = []
    marker = yield from copy_until(("{", ARGUMENTS, CALL_ID), name.append, opening)
    if marker == CALL_ID:
        _, marker = yield from take_until(("{", ARGUMENTS))
    if not "".join(name).strip():
        return
    call.name("".join(name).strip())
    if marker == ARGUMENTS:
        yield from copy_until(("{",), drop)
    call.arguments("{")
    yield from nested(call.arguments)
