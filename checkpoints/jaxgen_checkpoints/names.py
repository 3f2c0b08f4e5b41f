"""Names of tensors: the nearest known one, the layer in one, and layers in few words."""

import difflib
import re
from collections.abc import Iterable, Sequence


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`; None where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return near[0] if near else None


def ranges(numbers: Sequence[int]) -> str:
    """Return `0-3, 7` for [0, 1, 2, 3, 7]."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def layer_pattern(prefix: str) -> re.Pattern[str]:
    """Match `prefix.N.rest`; groups: N and rest."""
    return re.compile(rf"{re.escape(prefix)}\.(0|[1-9][0-9]*)\.(.+)", re.DOTALL)
