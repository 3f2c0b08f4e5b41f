"""One answer read by two parsers: what is no reasoning may hold calls."""

from collections.abc import Iterable

from jaxgen.serving.parsers.events import Event, Text, coalesced
from jaxgen.serving.parsers.reading import Parser


class OutputParser:
    """A reasoning parser, then a tool parser on its text; either may be None.

    needs_special_tokens: ask for skip_special_tokens=False, or the parsers miss their markers.
    """

    def __init__(self, reasoning: Parser | None, tools: Parser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self.needs_special_tokens = any(
            parser.needs_special_tokens for parser in (reasoning, tools) if parser is not None
        )

    def push(self, text: str) -> list[Event]:
        """What is certain now that `text` has come."""
        first = [Text(text)] if self._reasoning is None else self._reasoning.push(text)
        return coalesced(self._through_tools(first))

    def finish(self) -> list[Event]:
        """All that was held back."""
        first = [] if self._reasoning is None else self._reasoning.finish()
        events = self._through_tools(first)
        return coalesced([*events, *([] if self._tools is None else self._tools.finish())])

    def _through_tools(self, events: Iterable[Event]) -> list[Event]:
        if self._tools is None:
            return list(events)
        told: list[Event] = []
        for event in events:
            told += self._tools.push(event.text) if isinstance(event, Text) else [event]
        return told
