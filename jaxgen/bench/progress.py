"""How far an offline run had come after each of its steps."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """After a step: seconds since the beginning, its output tokens, requests that run and wait."""

    seconds: float
    tokens: int
    running: int
    waiting: int
