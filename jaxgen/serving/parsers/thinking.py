"""Reasoning before the answer, up to </think>."""

from jaxgen.serving.parsers.events import Reasoning, Text
from jaxgen.serving.parsers.reading import (
    Ended,
    Reader,
    ReadingParser,
    character,
    copy_until,
    next_visible,
)

BEGIN, END = "<think>", "</think>"


class ThinkingParser(ReadingParser):
    """DeepSeek-R1's way: all is reasoning up to the end mark; the begin mark is in the prompt.

    It may be in the text too. White space before the marks' texts is dropped.
    """

    always_thinks = True

    def _read(self) -> Reader[None]:
        opening = yield from self._opening()
        if opening == BEGIN or self.always_thinks:
            yield from copy_until((END,), self._think, "" if opening == BEGIN else opening)
            opening = yield from next_visible()
        yield from copy_until((), self._say, opening)

    def _opening(self) -> Reader[str]:
        """The begin mark, or as much as shows that it is something else."""
        held = ""
        try:
            while not held or (BEGIN.startswith(held) and held != BEGIN):
                held += yield from (character() if held else next_visible(self._otherwise))
        except Ended:
            self._otherwise(held)
            raise
        return held

    def _otherwise(self, text: str) -> None:
        self._think(text) if self.always_thinks else self._say(text)

    def _think(self, text: str) -> None:
        self._tell(Reasoning(text))

    def _say(self, text: str) -> None:
        self._tell(Text(text))


class MarkedThinkingParser(ThinkingParser):
    """Qwen3's way: there is reasoning only where the text begins with the begin mark."""

    always_thinks = False
