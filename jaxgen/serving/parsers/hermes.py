"""Hermes' and Qwen's calls: JSON between <tool_call> and </tool_call>."""

from jaxgen.serving.parsers.call_json import CallWriter, call_object
from jaxgen.serving.parsers.reading import Reader, copy_until, drop, next_visible
from jaxgen.serving.parsers.tool_parser import ToolParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Text around calls is text; white space behind a call is dropped."""

    def _read(self) -> Reader[None]:
        begun = ""
        while True:
            yield from copy_until((BEGIN,), self._say, begun)
            begun = ""
            if (yield from self._try_call(BEGIN, _call)):
                yield from copy_until((END,), drop)
                begun = yield from next_visible()


def _call(call: CallWriter) -> Reader[None]:
    if (yield from next_visible()) == "{":
        yield from call_object(call)
