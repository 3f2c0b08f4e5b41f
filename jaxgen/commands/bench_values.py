"""What options of the benches may hold: numbers with bounds, ranges, pairs, JSON."""

import argparse
import json
from collections.abc import Callable
from typing import Any


def whole(least: int) -> Callable[[str], int]:
    """A whole number from `least` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number from {least} on, got {text!r}")
        return int(text)

    return read


def number(least: float = 0.0) -> Callable[[str], float]:
    """A number from `least` on; infinity is one."""

    def read(text: str) -> float:
        value = _as_float(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"expected a number from {least:g} on, got {text!r}")
        return value

    return read


def rate(text: str) -> float:
    """A number above 0; infinity is one."""
    value = _as_float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def finite_rate(text: str) -> float:
    """A number above 0."""
    value = rate(text)
    if value == float("inf"):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r}")
    return value


def finite(text: str) -> float:
    """A number above 0 and below infinity."""
    value = rate(text)
    if value == float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number below infinity, got {text!r}")
    return value


def span(text: str) -> tuple[int, int]:
    """LOW:HIGH, whole numbers from 1 on."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"expected LOW:HIGH, got {text!r}")
    return int(low), int(high)


def pair(text: str) -> tuple[str, str]:
    """KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not key.strip() or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key.strip(), value.strip()


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def _as_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
