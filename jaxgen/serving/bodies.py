"""Request bodies: JSON objects of a bounded depth, in Unicode that can be encoded again."""

import asyncio
import json
import math
import re
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from jaxgen.serving.errors import ApiError, bad_request

SHORT_BODY = 128 * 1024
"""Bytes that are read at once; a longer body is read in a thread, others are served meanwhile."""

_OTHER_FORM = (
    *("string_type", "list_type", "dict_type", "model_type", "int_type", "int_parsing"),
    "literal_error",
)
_FORM = re.compile(r"[\[\]()]|^(str|int|float|bool|NamedTool)$")
_FORMS = {
    "prompt": "must be a text, token ids, or a list of texts or of lists of token ids",
    "tokens": "must be token ids, or a list of lists of them",
    "input": "must be a text or a list of items",
    "stop": "must be a text or a list of texts",
    "tool_choice": "must be none, auto, required, or the function that must be called",
}
"""Of fields that may have one of several."""

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body[Model: BaseModel](request: Request, model: type[Model], depth: int) -> Model:
    """The request's body, validated. ApiError 400 or 415 says what is wrong with it."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.endswith("+json")):
        raise ApiError(415, f"Content-Type must be application/json, not {media!r}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise ApiError(415, f"Content-Encoding {coding!r} is not understood: send plain JSON")
    body = await request.body()
    if len(body) <= SHORT_BODY:
        return validated(model, parse_object(body, depth))
    return await asyncio.to_thread(lambda: validated(model, parse_object(body, depth)))


def parse_object(body: bytes, depth: int) -> dict[str, Any]:
    """The JSON object in `body`, whose containers are nested at most `depth` deep."""
    try:
        # Decoded here: `json` would let through the bytes of surrogates, and what is no UTF-8.
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise bad_request(f"the JSON body is nested deeper than {depth}") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {type(value).__name__}")
    opened = body.count(b"[") + body.count(b"{")  # a list of 100,000 token ids is one
    if opened > depth and _depth_exceeds(value, depth):
        raise bad_request(f"the JSON body is nested deeper than {depth}")
    if _SURROGATE_ESCAPE.search(body):
        _refuse_lone_surrogates(value)
    return value


def validated[Model: BaseModel](model: type[Model], value: dict[str, Any]) -> Model:
    """`value` as `model`; the first thing wrong is told with its place."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        first = min(found, key=_vagueness)
        field = str(first["loc"][0]) if first["loc"] else None
        others = len({str(each["loc"][:1]) for each in found}) - 1
        more = f" (and {others} more fields)" if others else ""
        said = first["msg"].removeprefix("Value error, ")
        place = _place(first["loc"])
        if _vagueness(first) and field in _FORMS:
            place, said = f"{field}: ", _FORMS[field]
        raise bad_request(place + said + more, field) from None


def _vagueness(error: ErrorDetails) -> bool:
    """A field of several forms fails in each of them; what is said of a part of one is meant."""
    return error["type"] in _OTHER_FORM


def _place(loc: tuple[int | str, ...]) -> str:
    """Names and positions, without the names that pydantic has for a field's forms."""
    shown = [str(part) for part in loc if not (isinstance(part, str) and _FORM.search(part))]
    return f"{'.'.join(shown)}: " if shown else ""


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is more than a number can be")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _depth_exceeds(value: object, depth: int) -> bool:
    """Level by level, so that no nesting can exhaust the stack."""
    level: list[Any] = [value]
    for _ in range(depth):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def _refuse_lone_surrogates(value: object) -> None:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                raise bad_request("the body holds a lone surrogate, which is no text") from None
        elif isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
