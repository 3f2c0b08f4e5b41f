"""JSON as checkpoints must hold it: one object, every key once, every number finite.

Python's own parser keeps the last of two equal keys and accepts NaN; both would change a model in
silence.
"""

import json
from pathlib import Path
from typing import Any, NoReturn

from jaxgen_checkpoints.errors import CheckpointError, RefusedInput
from jaxgen_checkpoints.readers.file_slices import read_range, regular_file_size
from jaxgen_checkpoints.source import printable_name

MAX_JSON_BYTES = 100_000_000


class _FaultyError(ValueError):
    """A fault that the JSON parser itself would let pass."""


def read_json_object(
    path: str | Path, *, error: type[RefusedInput] = CheckpointError
) -> dict[str, Any]:
    """Read the file at `path`, which must hold one JSON object.

    Raises `error` if it is missing, not a regular file, larger than 100 MB, not UTF-8, not JSON
    (with line and column), repeats a key, holds NaN or Infinity, is nested too deeply, or is not an
    object.
    """
    path = Path(path)
    size = regular_file_size(path, error=error)
    if size > MAX_JSON_BYTES:
        raise error(f"{path}: expected at most {MAX_JSON_BYTES} bytes of JSON, got {size}")
    return parse_json_object(read_range(path, 0, size), str(path), error=error)


def parse_json_object(
    data: bytes, where: str, *, error: type[RefusedInput] = CheckpointError
) -> dict[str, Any]:
    """Parse `data` as one JSON object; `where` begins every message. Raises `error` as above."""
    try:
        value = json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
        )
    except UnicodeDecodeError as fault:
        raise error(f"{where}: not UTF-8 text (byte {fault.start})") from fault
    except json.JSONDecodeError as fault:
        raise error(
            f"{where}: not valid JSON: {fault.msg} at line {fault.lineno}, column {fault.colno}"
        ) from fault
    except _FaultyError as fault:
        raise error(f"{where}: {fault}") from fault
    except RecursionError as fault:
        raise error(f"{where}: JSON nested too deeply") from fault
    except ValueError as fault:  # an integer of more digits than Python converts
        raise error(f"{where}: not valid JSON: {fault}") from fault
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object {{...}}, got {_kind(value)}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _FaultyError(f"the key {printable_name(key)!r} stands twice in one object")
            seen.add(key)
    return result


def _no_constant(text: str) -> NoReturn:
    raise _FaultyError(f"{text} is not a JSON number; expected a finite one")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds: dict[type, str] = {
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return kinds[type(value)]
