"""What form an output must have (vLLM's `structured_outputs`), as far as no library must check it.

Whether a schema or grammar means anything is found when it is compiled.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from jaxgen.sampling.invalid import InvalidParameter

NAME = "structured_outputs"
LONGEST = 512 * 1024
"""Characters of a schema, expression or grammar."""

LONGEST_MARK = 256
"""Characters of `after`, which is looked for behind every token."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Exactly one of the KINDS. InvalidParameter, naming structured_outputs, otherwise.

    json: a schema, as JSON text or as what that means. regex: the whole output matches it. choice:
    the output is one of these. grammar: GBNF, or Lark as llguidance writes it. json_object: any
    JSON object. structural_tag: text in which each trigger begins a tag with JSON in it.
    disable_any_whitespace: none between the parts of JSON. whitespace_pattern: what may be there.
    disable_additional_properties: of objects whose schema does not speak of them. after: all of
    this holds for what follows that text, and anything may come before. opening: what comes before
    begins with this token; an output that does not begin so has the form from its beginning.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool = False
    after: str | None = None
    opening: str | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            said = " and ".join(given) or "none of them"
            raise InvalidParameter(NAME, f"must have one of {', '.join(KINDS)}, not {said}")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _json_text(name, value))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern", "after", "opening"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise InvalidParameter(NAME, f"{name} must be a non-empty text, not {value!r}")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name) not in (None, True, False):
                raise InvalidParameter(NAME, f"{name} must be true or false")
        if self.after is not None and len(self.after) > LONGEST_MARK:
            raise InvalidParameter(NAME, f"after may have {LONGEST_MARK} characters")
        if self.opening is not None and self.after is None:
            raise InvalidParameter(NAME, "opening needs after: where the form begins to hold")
        if len(self.text) > LONGEST:
            raise InvalidParameter(NAME, f"may have {LONGEST} characters, not {len(self.text)}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From a request's body; unknown names are refused."""
        known = [entry.name for entry in fields(cls)]
        for name in values:
            if name not in known:
                raise InvalidParameter(NAME, f"knows no {name!r}, only {', '.join(known)}")
        return cls(**values)

    @property
    def kind(self) -> str:
        """Which of the KINDS it is."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def text(self) -> str:
        """Its schema, expression or grammar as text."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json_text(name: str, value: object) -> str:
    """JSON text of an object (or of a boolean, which is a schema too)."""
    try:
        read = json.loads(value) if isinstance(value, str) else value
        if not isinstance(read, Mapping | bool):
            raise ValueError("it is no object")
        return json.dumps(read)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(NAME, f"{name} must be a JSON object: {error}") from None


def _choices(value: object) -> tuple[str, ...]:
    options = tuple(value) if isinstance(value, list | tuple) else ()
    if not options or not all(isinstance(option, str) and option for option in options):
        raise InvalidParameter(NAME, f"choice must be a list of non-empty texts, not {value!r}")
    return tuple(dict.fromkeys(options))
