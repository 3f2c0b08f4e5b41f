"""Schemas, expressions and grammars become matchers; whatever they are, within bounds of effort."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, grammar_from

from jaxgen.grammar.matcher import Matcher
from jaxgen.grammar.reasoning import AnswerOnly
from jaxgen.grammar.token_mask import ConstraintFailed, MaskSource, words_of
from jaxgen.grammar.vocabulary import guided_vocabulary
from jaxgen.sampling import InvalidParameter
from jaxgen.sampling.structured import NAME, StructuredOutputs
from jaxgen.text.tokenizer import Tokenizer

REMEMBERED = 64
"""Compiled grammars that are kept, to be copied for the next request that has the same."""

WHITE_SPACE = r"[ \n\r\t]{0,64}"
"""Between two parts of JSON, where a request does not say: enough for any indentation, and a model
that likes white space best does not fill its context with it.
"""

LONGEST_GRAMMAR = 64 * 1024
"""Characters of a grammar in GBNF, which Python translates."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""About a second to compile, and a few hundredths for a token: what is harder is refused."""


class GrammarCompiler:
    """Compiles for one tokenizer. Its methods may be called from any thread, and take their time.

    eos_ids: what may end the text where a grammar is satisfied.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputs, MaskSource] = OrderedDict()

    def compile(self, wanted: StructuredOutputs) -> MaskSource:
        """The beginning of the grammar. InvalidParameter if it means nothing, or is too hard."""
        with self._lock:
            vocabulary = self._need_vocabulary()
            known = self._compiled.get(wanted)
            if known is not None:
                self._compiled.move_to_end(wanted)
                return known.copy()
        text = _source(wanted, self._tokenizer)
        matcher = LLMatcher(vocabulary, text, limits=LIMITS, log_level=0)
        try:
            grammar: MaskSource = Matcher(matcher, words_of(vocabulary.vocab_size))
            grammar.write(np.full(words_of(self._vocab_size), -1, np.int32))
        except ConstraintFailed as error:
            raise InvalidParameter(NAME, f"cannot be served: {error}") from None
        if wanted.after is not None:
            assert self._tokenizer is not None
            grammar = AnswerOnly(grammar, self._tokenizer, wanted.after, wanted.opening)
        with self._lock:
            self._compiled[wanted] = grammar
            while len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
            return grammar.copy()

    def _need_vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            raise InvalidParameter(NAME, "need a tokenizer, and the checkpoint has none")
        if self._vocabulary is None:
            self._vocabulary = guided_vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
        return self._vocabulary


def _source(wanted: StructuredOutputs, tokenizer: Tokenizer | None) -> str:
    """The grammar in llguidance's own terms."""
    text = wanted.text
    try:
        if wanted.kind in ("json", "json_object"):
            schema = {"type": "object"} if wanted.kind == "json_object" else json.loads(text)
            if wanted.disable_additional_properties:
                schema = _closed(schema)
            return LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides=_spacing(wanted)
            )
        if wanted.kind == "regex":
            return LLMatcher.grammar_from_regex(text)
        if wanted.kind == "choice":
            options = (json.dumps(option, ensure_ascii=False) for option in wanted.choice or ())
            return LLMatcher.grammar_from_lark("start: " + " | ".join(options))
        if wanted.kind == "structural_tag":
            return _tags(json.loads(text), tokenizer)
        if len(text) > LONGEST_GRAMMAR:
            message = f"grammar may have {LONGEST_GRAMMAR} characters, not {len(text)}"
            raise InvalidParameter(NAME, message)
        return grammar_from("grammar", text)
    except (ValueError, TypeError, KeyError, AssertionError, RecursionError) as error:
        if isinstance(error, InvalidParameter):
            raise
        raise InvalidParameter(NAME, f"cannot be read: {error}") from None


def _spacing(wanted: StructuredOutputs) -> Any:  # noqa: ANN401 (a TypedDict of the library's stubs)
    if wanted.disable_any_whitespace and wanted.whitespace_pattern is None:
        return {"whitespace_flexible": False}
    pattern = wanted.whitespace_pattern or WHITE_SPACE
    flexible = {"whitespace_flexible": False} if wanted.disable_any_whitespace else {}
    return {"whitespace_pattern": pattern, **flexible}


def _closed(schema: Any) -> Any:  # noqa: ANN401
    """The schema with no other properties than those it names, in every object that names some."""
    if isinstance(schema, list):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _tags(tag: Any, tokenizer: Tokenizer | None) -> str:  # noqa: ANN401
    """vLLM's {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    if "structures" not in tag or "triggers" not in tag:
        raise ValueError("structural_tag needs structures and triggers")
    triggers = [str(trigger) for trigger in tag["triggers"]]
    structures = []
    for entry in tag["structures"]:
        if not (isinstance(entry["begin"], str) and isinstance(entry["end"], str)):
            raise ValueError("begin and end of a structure must be text")
        fitting = [trigger for trigger in triggers if entry["begin"].startswith(trigger)]
        if not fitting:
            raise ValueError(f"no trigger begins the tag {entry['begin']!r}")
        structures.append(
            StructTag(
                trigger=fitting[0],
                begin=entry["begin"],
                grammar=entry.get("schema", {"type": "object"}),
                end=entry["end"],
            )
        )
    ids = [tokenizer.token_to_id(trigger) for trigger in triggers] if tokenizer else []
    special = bool(ids) and all(tokenizer and token in tokenizer.special_ids for token in ids)
    return StructTag.to_grammar(structures, assume_special=special)
