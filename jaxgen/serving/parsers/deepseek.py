"""DeepSeek's calls: V3 names the function on a line and fences its JSON, V3.1 writes it plainly."""

# ruff: noqa: RUF001 (the bars are DeepSeek's own)

from typing import ClassVar

from jaxgen.serving.parsers.call_json import CallWriter, nested
from jaxgen.serving.parsers.reading import Reader, copy_until, drop, next_visible, take_until
from jaxgen.serving.parsers.tool_parser import ToolParser

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekParser(ToolParser):
    """White space between and behind calls is dropped."""

    needs_special_tokens: ClassVar[bool] = True

    def _read(self) -> Reader[None]:
        begun = ""
        while True:
            yield from copy_until((BEGIN,), self._say, begun)
            while (yield from copy_until((CALL, END), drop)) == CALL:
                yield from self._try_call(CALL, _call)
            begun = yield from next_visible()


def _call(call: CallWriter) -> Reader[None]:
    name, _ = yield from take_until((SEPARATOR,))
    if name.strip() == "function":
        name, _ = yield from take_until(("\n",))
    if not name.strip():
        return
    call.name(name.strip())
    if (yield from copy_until(("{", CALL_END), drop)) == "{":
        call.arguments("{")
        yield from nested(call.arguments)
        yield from copy_until((CALL_END,), drop)
    call.close()
