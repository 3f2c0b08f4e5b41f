"""What a parser finds in a model's text, in the order in which it comes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins: the index-th, from 0, of the function `name`."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the index-th call's arguments; all pieces together are JSON text."""

    index: int
    text: str


type Event = Text | Reasoning | ToolCall | Arguments


def coalesced(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbouring pieces of one thing joined, and empty pieces left out."""
    joined: list[Event] = []
    for event in events:
        if isinstance(event, ToolCall):
            joined.append(event)
            continue
        last = joined[-1] if joined else None
        if not event.text:
            continue
        if _continues(event, last):
            assert last is not None
            assert not isinstance(last, ToolCall)
            joined[-1] = replace(last, text=last.text + event.text)
        else:
            joined.append(event)
    return joined


def _continues(event: Event, last: Event | None) -> bool:
    same = type(event) is type(last)
    if isinstance(event, Arguments) and isinstance(last, Arguments):
        return event.index == last.index
    return same
