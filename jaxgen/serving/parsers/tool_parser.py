"""What the parsers of calls share: text is told as text, and so is a call that is none."""

from collections.abc import Callable

from jaxgen.serving.parsers.call_json import CallWriter
from jaxgen.serving.parsers.events import Text
from jaxgen.serving.parsers.reading import Reader, ReadingParser


class ToolParser(ReadingParser):
    """Counts calls. Once its name is told a call stays one, however its arguments go on."""

    def __init__(self) -> None:
        self._calls = 0
        super().__init__()

    def _say(self, text: str) -> None:
        self._tell(Text(text))

    def _try_call(self, opening: str, read: Callable[[CallWriter], Reader[object]]) -> Reader[bool]:
        """Has `read` read a call; what it took is text, behind `opening`, if it told no name."""
        taken = [opening]
        call = CallWriter(self._calls, self._tell)
        try:
            yield from _recorded(read(call), taken)
        finally:
            if call.begun:
                self._calls += 1
            else:
                self._say("".join(taken))
        return call.begun


def _recorded(reader: Reader[object], taken: list[str]) -> Reader[None]:
    """`reader`, with a record of all that it takes."""
    alone = next(reader)
    while True:
        piece = yield alone
        taken.append(piece)
        try:
            alone = reader.send(piece)
        except StopIteration:
            return
