"""Parsers of what models write: reasoning, answer and calls of tools, told while they come."""

from collections.abc import Callable, Mapping

from jaxgen.serving.parsers.deepseek import DeepSeekParser
from jaxgen.serving.parsers.events import Arguments, Event, Reasoning, Text, ToolCall, coalesced
from jaxgen.serving.parsers.hermes import HermesParser
from jaxgen.serving.parsers.llama3_json import Llama3JsonParser
from jaxgen.serving.parsers.mistral import MistralParser
from jaxgen.serving.parsers.output import OutputParser
from jaxgen.serving.parsers.reading import Parser
from jaxgen.serving.parsers.thinking import MarkedThinkingParser, ThinkingParser
from jaxgen_checkpoints.errors import ConfigError

TOOL_PARSERS: Mapping[str, Callable[[], Parser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekParser,
}
REASONING_PARSERS: Mapping[str, Callable[[], Parser]] = {
    "deepseek_r1": ThinkingParser,
    "qwen3": MarkedThinkingParser,
}
BEGUN = "deepseek_r1"
"""The reasoning parser, whatever the model, of a text whose thoughts were begun in the prompt."""


def make_parser(*, tools: str | None = None, reasoning: str | None = None) -> OutputParser:
    """A fresh parser for one answer; ConfigError, naming the known ones, for an unknown name."""
    return OutputParser(
        _find("reasoning_parser", reasoning, REASONING_PARSERS),
        _find("tool_call_parser", tools, TOOL_PARSERS),
    )


def read_after(reasoning: str | None, parser: Parser) -> OutputParser:
    """`parser` for what follows the reasoning, which a fresh parser of that name reads."""
    return OutputParser(_find("reasoning_parser", reasoning, REASONING_PARSERS), parser)


def always_thinks(reasoning: str) -> bool:
    """Whether that parser takes a text for reasoning that does not begin with a mark."""
    found = REASONING_PARSERS[reasoning]
    return isinstance(found, type) and issubclass(found, ThinkingParser) and found.always_thinks


def _find(what: str, name: str | None, known: Mapping[str, Callable[[], Parser]]) -> Parser | None:
    if name is None:
        return None
    if name not in known:
        raise ConfigError(f"{what} must be one of {', '.join(known)}; got {name!r}")
    return known[name]()


__all__ = [
    "BEGUN",
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Arguments",
    "Event",
    "OutputParser",
    "Parser",
    "Reasoning",
    "Text",
    "ToolCall",
    "always_thinks",
    "coalesced",
    "make_parser",
    "read_after",
]
