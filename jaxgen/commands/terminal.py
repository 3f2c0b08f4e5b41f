"""What commands write: answers and reports on stdout, everything about them on stderr."""

import json
import sys
from collections.abc import Sequence
from typing import Any


def say(text: str = "", *, end: str = "\n") -> None:
    """Writes to stdout, at once: answers are streamed."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def note(text: str) -> None:
    """Writes a line to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def say_json(value: dict[str, Any]) -> None:
    """Writes one JSON object to stdout."""
    say(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))


def one_line(text: str) -> str:
    """The text with its line breaks turned into spaces."""
    return " ".join(text.split())


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Rows as aligned columns, two spaces apart; the columns in `right` are flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size(count: float) -> str:
    """A number of bytes in decimal units: 135.1 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
