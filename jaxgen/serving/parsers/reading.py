"""Parsers written as if they had the whole text: generators that are sent it from its beginning.

So where the stream is cut cannot matter. What might be the beginning of a marker is held back; the
end of the text sets it free. Answers are long: what holds no character that matters to a reader is
sent to it at once.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import ClassVar, Protocol

from jaxgen.serving.parsers.events import Event, coalesced

type Reader[T] = Generator[str | None, str, T]
"""A generator that takes pieces of the text; "" is its end.

It yields which characters it must be sent each on its own: those in the string, or all for None.
"""


class Ended(Exception):
    """The text ended while a reader wanted more of it."""


class Parser(Protocol):
    """Reads a model's text as it grows; every character of it comes out once, or is a marker.

    needs_special_tokens: its markers are special tokens, so that these must be in the text.
    """

    needs_special_tokens: ClassVar[bool]

    def push(self, text: str) -> list[Event]:
        """What is certain now that `text` has come."""
        ...

    def finish(self) -> list[Event]:
        """All that was held back: there is no more text. Nothing may be pushed after."""
        ...


class ReadingParser:
    """A parser whose `_read` is one generator over the whole text."""

    needs_special_tokens: ClassVar[bool] = False

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._reader = self._read()
        self._alone = next(self._reader)

    def push(self, text: str) -> list[Event]:
        """What is certain now that `text` has come."""
        place = 0
        while place < len(text):
            end = _piece_end(text, place, self._alone)
            self._alone = self._reader.send(text[place:end])
            place = end
        return self._taken()

    def finish(self) -> list[Event]:
        """All that was held back."""
        with contextlib.suppress(Ended):
            self._reader.send("")
        return self._taken()

    def _read(self) -> Reader[None]:
        """Reads for ever; Ended is what ends it."""
        raise NotImplementedError

    def _tell(self, event: Event) -> None:
        self._events.append(event)

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return coalesced(events)


def _piece_end(text: str, place: int, alone: str | None) -> int:
    """Where the piece ends that begins there: behind one character, or before one of `alone`."""
    if alone is None or text[place] in alone:
        return place + 1
    found = (text.find(character, place) for character in alone)
    return min((each for each in found if each >= 0), default=len(text))


def character() -> Reader[str]:
    """The next character; Ended at the end."""
    return (yield from _piece(None))


def stretch(alone: str) -> Reader[str]:
    """One of the characters `alone`, or text that has none of them; Ended at the end."""
    return (yield from _piece(alone))


def _piece(alone: str | None) -> Reader[str]:
    taken = yield alone
    if not taken:
        raise Ended
    return taken


def copy_until(markers: Sequence[str], emit: Callable[[str], None], begun: str = "") -> Reader[str]:
    """Emits what comes before the first of the markers, and gives that marker.

    No marker may be the beginning of another. begun: characters that were taken before. At the end
    of the text all of it is emitted.
    """
    held, firsts = begun, "".join({marker[0] for marker in markers})
    try:
        while True:
            while held and not any(marker.startswith(held) for marker in markers):
                emit(held[0])
                held = held[1:]
            if held in markers:
                return held
            if held:
                held += yield from character()
                continue
            taken = yield from stretch(firsts)
            if taken in firsts:
                held = taken
            else:
                emit(taken)
    except Ended:
        emit(held)
        raise


def take_until(markers: Sequence[str]) -> Reader[tuple[str, str]]:
    """(the text before the first of the markers, that marker)."""
    taken: list[str] = []
    marker = yield from copy_until(markers, taken.append)
    return "".join(taken), marker


def next_visible(emit: Callable[[str], None] | None = None) -> Reader[str]:
    """The next character that is no white space, which goes to `emit` or is dropped."""
    while True:
        taken = yield from character()
        if not taken.isspace():
            return taken
        if emit is not None:
            emit(taken)


def drop(text: str) -> None:
    """Emits nothing."""
    del text
