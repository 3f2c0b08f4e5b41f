"""Llama 3's calls: an answer that is {"name": ..., "parameters": {...}}, or several with ; between.

The tag that may come before is a special token; it makes no difference whether it is in the text.
"""

from jaxgen.serving.parsers.call_json import call_object
from jaxgen.serving.parsers.reading import Ended, Reader, character, copy_until, next_visible
from jaxgen.serving.parsers.tool_parser import ToolParser

TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """An answer that begins with anything else, or with an object that is no call, is text."""

    def _read(self) -> Reader[None]:
        opening = yield from next_visible(self._say)
        if opening == "<":
            opening = yield from self._tag(opening)
        while opening == "{" and (yield from self._try_call("{", call_object)):
            opening = ";"
            while opening == ";":
                opening = yield from next_visible()
        yield from copy_until((), self._say, "" if opening == "{" else opening)

    def _tag(self, held: str) -> Reader[str]:
        """What comes behind the tag, if this is the tag; else what was taken so far."""
        try:
            while TAG.startswith(held) and held != TAG:
                held += yield from character()
        except Ended:
            self._say(held)
            raise
        return held if held != TAG else (yield from next_visible())
