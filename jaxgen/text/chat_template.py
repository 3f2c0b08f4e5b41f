"""A conversation becomes the prompt the model was trained on: its Jinja template, in a sandbox.

Templates come with checkpoints and are not trusted: attributes of Python objects are out of reach,
size and time are bounded. The conventions are those of transformers: hub templates work unchanged.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxgen_checkpoints.errors import RefusedInput

LONGEST_PROMPT = 16 * 2**20
MOST_STEPS = 10**6
LONGEST_SECONDS = 10.0
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
_CONTINUE = "\N{OBJECT REPLACEMENT CHARACTER}continue here "


class ChatTemplateError(RefusedInput):
    """The chat template is absent, broken, refuses this conversation, or does what it must not."""


class ChatTemplate:
    """One or several named Jinja templates; compiled in use: a broken one harms only chats."""

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        """`source`: a template, or name -> template; `special_tokens` like {"bos_token": "<s>"}."""
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        name: str | None = None,
        **variables: Any,  # noqa: ANN401 (whatever the template of a model knows)
    ) -> str:
        """The prompt's text, special tokens included: encode it with add_special_tokens=False.

        `continue_final_message` leaves the last message open for the model to go on. `name` picks
        one of several templates; by default "tool_use" where tools are given, else "default".
        Raises ChatTemplateError.
        """
        if continue_final_message and add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise ChatTemplateError(message)
        chat = _plain(messages)
        if continue_final_message:
            _mark_end(chat)
        try:
            source = self._pick(name, with_tools=bool(tools))
            text = _bounded(
                _compiled(source).generate(
                    messages=chat,
                    tools=_plain(tools),
                    documents=_plain(documents),
                    add_generation_prompt=add_generation_prompt,
                    **(_functions() | self._special_tokens | variables),
                )
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template failed: {error}") from error
        except (
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            ArithmeticError,
            RecursionError,
        ) as error:
            kind = type(error).__name__
            raise ChatTemplateError(f"the chat template failed: {kind}: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text

    def _pick(self, name: str | None, *, with_tools: bool) -> str:
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            known = ", ".join(sorted(self.sources))
            raise ChatTemplateError(f"there is no chat template named {name!r}; there are: {known}")
        return self.sources[name]


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only shows its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox, and no product that would fill the memory."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(
        self,
        context: jinja2.runtime.Context,
        operator: str,
        left: Any,  # noqa: ANN401
        right: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        if not _fits(operator, left, right):
            raise jinja2.TemplateRuntimeError(f"{operator!r} of this size is not allowed here")
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:  # noqa: ANN401
        """Refuse at once, where Jinja would wait until the value is used."""
        kind = type(obj).__name__
        raise SecurityError(f"access to {attribute!r} of a {kind} is not allowed")


def _fits(operator: str, left: object, right: object) -> bool:
    """Whether the result is of a size that a prompt could want."""
    if operator == "%":
        return not (isinstance(left, str) and _WIDE_FIELD.search(left))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
        return bits <= 256
    sizes = [len(side) for side in (left, right) if isinstance(side, str | list)]
    if operator == "*" and sizes:
        times = [abs(side) for side in (left, right) if isinstance(side, int)]
        return max(sizes) * max(times, default=1) <= LONGEST_PROMPT
    return sum(sizes) <= LONGEST_PROMPT


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """Compiling takes many times as long as rendering, and servers render for every request."""
    return _environment().from_string(source)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    return environment


def _functions() -> dict[str, Any]:
    """What templates may call. Made for one rendering: its steps and seconds count from here."""
    return {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "range": _counted_range(),
    }


def _counted_range() -> Callable[..., Sequence[int]]:
    """A `range` whose loops, all together, make at most MOST_STEPS steps in LONGEST_SECONDS."""
    steps, end = 0, time.monotonic() + LONGEST_SECONDS

    def counted(*bounds: int) -> Sequence[int]:
        nonlocal steps
        numbers = range(*bounds)
        steps += 1 + min(len(numbers), MOST_STEPS)
        if steps > MOST_STEPS or time.monotonic() > end:
            raise jinja2.TemplateRuntimeError(f"its loops are longer than {MOST_STEPS} steps")
        return numbers

    return counted


def _bounded(pieces: Iterator[str]) -> str:
    text, length, end = [], 0, time.monotonic() + LONGEST_SECONDS
    for piece in pieces:
        text.append(piece)
        length += len(piece)
        if length > LONGEST_PROMPT:
            message = f"it writes more than {LONGEST_PROMPT} characters"
            raise jinja2.TemplateRuntimeError(message)
        if time.monotonic() > end:
            raise jinja2.TemplateRuntimeError(f"it takes longer than {LONGEST_SECONDS:.0f} s")
    return "".join(text)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _plain(value: Any) -> Any:  # noqa: ANN401
    """A copy made of dicts, lists and plain values only: nothing that a template could call."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ChatTemplateError(f"messages hold text, numbers, lists and maps, not {type(value)}")


def _mark_end(chat: list[dict[str, Any]]) -> None:
    """Put a mark behind the last message's text (its last text part where it has parts)."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE
        return
    for part in reversed(content or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _CONTINUE
            return
    raise ChatTemplateError("continue_final_message needs a final message that has text")


def _cut_at_mark(text: str) -> str:
    """The text up to the mark; where the template trimmed the message, without trailing space."""
    place = text.rfind(_CONTINUE.strip())
    if place < 0:
        raise ChatTemplateError("the chat template drops the final message: it cannot be continued")
    kept = text[:place]
    return kept if text.startswith(_CONTINUE, place) else kept.rstrip()
