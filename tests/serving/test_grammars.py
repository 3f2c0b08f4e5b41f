"""Grammars by themselves: hostile ones cost bounded effort, words are banned to the letter."""

import contextlib
import time

import numpy as np
import pytest

from jaxgen.grammar.compiler import GrammarCompiler
from jaxgen.grammar.token_mask import words_of
from jaxgen.grammar.word_rules import BannedWords
from jaxgen.sampling import InvalidParameter, StructuredOutputs
from jaxgen.text import load_tokenizer

HOSTILE = {
    "many keys": {
        "json": {
            "type": "object",
            "properties": {f"k{i}": {"type": "string", "pattern": "^a{1,50}$"} for i in range(900)},
        }
    },
    "many values": {"json": {"enum": [f"value {i}" for i in range(30_000)]}},
    "bomb": {"regex": "(((((a{1,100}){1,100}){1,100}){1,100}){1,100})"},
    "products": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(6)]}
                for i in range(8)
            ]
        }
    },
    "endless": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "deep": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "grammar": {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    "lark": {"grammar": "start: a\na: a a a a | a a a | "},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_forms_are_refused_or_served_in_bounded_time(golden_dir, name):
    compiler = GrammarCompiler(load_tokenizer(golden_dir("llama_plain")), 512, [2])
    compiler.compile(StructuredOutputs(choice=("warm",)))
    began = time.monotonic()
    with contextlib.suppress(InvalidParameter):
        compiler.compile(StructuredOutputs(**HOSTILE[name]))
    assert time.monotonic() - began < 10


def test_the_same_form_is_compiled_once(golden_dir):
    compiler = GrammarCompiler(load_tokenizer(golden_dir("qwen2")), 512, [499])
    first = compiler.compile(StructuredOutputs(choice=("ab", "ac")))
    first.advance(64)
    again = compiler.compile(StructuredOutputs(choice=("ab", "ac")))
    again.advance(64)
    assert len(compiler._compiled) == 1
    assert not again.ended


def test_a_word_is_banned_where_its_beginning_was_said():
    rule = BannedWords([[3], [40, 7], [1, 2, 7]], 64)

    def banned():
        mask = np.full(words_of(64), -1, np.int32)
        rule.write(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        return np.flatnonzero(bits == 0).tolist()

    told = []
    for token in (40, 2, 1, 2, 5):
        rule.advance(token)
        told.append(banned())
    assert told == [[3, 7], [3], [3], [3, 7], [3]]


def test_without_a_tokenizer_there_are_no_forms():
    with pytest.raises(InvalidParameter, match="need a tokenizer"):
        GrammarCompiler(None, 512).compile(StructuredOutputs(json_object=True))


@pytest.mark.parametrize(
    ("form", "most"),
    [
        ({"json": {"type": "object"}}, 64),
        ({"json_object": True}, 64),
        ({"json": {"type": "object"}, "whitespace_pattern": " {0,3}"}, 3),
        ({"json": {"type": "object"}, "disable_any_whitespace": True}, 0),
    ],
)
def test_white_space_between_parts_of_json_ends(tokenizer, form, most):
    """A model that likes it best would fill its context with it."""
    rule = GrammarCompiler(tokenizer, 512, (2,)).compile(StructuredOutputs(**form))
    (brace,) = tokenizer.encode_inside("{")
    (space,) = tokenizer.encode_inside(" ")
    rule.advance(brace)
    seen = 0
    while seen < 100:
        mask = np.full(16, -1, np.int32)
        rule.write(mask)
        if not mask.view(np.uint32)[space // 32] >> space % 32 & 1:
            break
        rule.advance(space)
        seen += 1
    assert seen == most
