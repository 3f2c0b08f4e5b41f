"""What is read from a model's text, however the text was cut on its way."""

# ruff: noqa: RUF001 (the bars are DeepSeek's own)

import json
import time

import pytest
from hypothesis import given, settings, strategies as st

from jaxgen.serving.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Arguments,
    Reasoning,
    Text,
    ToolCall,
    coalesced,
    make_parser,
)
from jaxgen_checkpoints.errors import ConfigError

CALL = '{"name": "add", "arguments": {"a": 1, "b": "}</tool_call>{\\"", "c": [{}]}}'
ARGUMENTS = '{"a": 1, "b": "}</tool_call>{\\"", "c": [{}]}'
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    + ARGUMENTS
    + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
ADD = [ToolCall(0, "add"), Arguments(0, ARGUMENTS)]
NOW = [ToolCall(1, "now"), Arguments(1, "{}")]

# (tool parser, reasoning parser, text, events)
CASES = [
    ("hermes", None, "no call <tool_cal at all", [Text("no call <tool_cal at all")]),
    ("hermes", None, f"Well:<tool_call>\n{CALL}\n</tool_call>\n", [Text("Well:"), *ADD]),
    (
        "qwen",
        None,
        f'<tool_call>{CALL}</tool_call>\n<tool_call> {{"name": "now"}}</tool_call> done',
        [*ADD, *NOW, Text("done")],
    ),
    (
        "hermes",
        None,
        '<tool_call>{"id": [1, "]"], "arguments": {"x": 2}, "n": 1, "name": "f"}</tool_call>',
        [ToolCall(0, "f"), Arguments(0, '{"x": 2}')],
    ),
    (
        "hermes",
        None,
        '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"\\u00e9\\"}"}</tool_call>',
        [ToolCall(0, "f"), Arguments(0, '{"x": "é"}')],
    ),
    ("hermes", None, "<tool_call>what</tool_call>", [Text("<tool_call>what</tool_call>")]),
    ("hermes", None, '<tool_call>{"na', [Text('<tool_call>{"na')]),
    ("hermes", None, "<tool_call>{'name': 1}", [Text("<tool_call>{'name': 1}")]),
    (
        "hermes",
        None,
        '<tool_call>{"name": "f", "arguments": {"x": "cut',
        [ToolCall(0, "f"), Arguments(0, '{"x": "cut')],
    ),
    ("llama3_json", None, 'It is {"name": "f"}', [Text('It is {"name": "f"}')]),
    ("llama3_json", None, ' {"answer": 42} ', [Text(' {"answer": 42} ')]),
    (
        "llama3_json",
        None,
        f'<|python_tag|>{CALL}; {{"name": "now", "parameters": {{}}}}',
        [*ADD, ToolCall(1, "now"), Arguments(1, "{}")],
    ),
    ("llama3_json", None, "<|python", [Text("<|python")]),
    ("llama3_json", None, "<|eot|>x", [Text("<|eot|>x")]),
    ("mistral", None, f"Ok. [TOOL_CALLS] [{CALL}]", [Text("Ok. "), *ADD]),
    ("mistral", None, f'[TOOL_CALLS][{CALL}, {{"name": "now"}}] end', [*ADD, *NOW, Text("end")]),
    (
        "mistral",
        None,
        f"[TOOL_CALLS]add{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]x1[ARGS]{{}}",
        [*ADD, *NOW],
    ),
    ("mistral", None, "[TOOL_CALLS]add", [Text("[TOOL_CALLS]add")]),
    ("mistral", None, "a [1] [TOOL", [Text("a [1] [TOOL")]),
    ("deepseek_v3", None, "Hm.\n" + V3, [Text("Hm.\n"), *ADD, *NOW]),
    (
        "deepseek_v3",
        None,
        V3.replace("function<｜tool▁sep｜>add", "add<｜tool▁sep｜>"),
        [*ADD, *NOW],
    ),
    (None, "deepseek_r1", "let me</think>\n\nHi", [Reasoning("let me"), Text("Hi")]),
    (None, "deepseek_r1", "<think>\nwhy</think>", [Reasoning("\nwhy")]),
    (None, "deepseek_r1", " never </thin", [Reasoning(" never </thin")]),
    (
        None,
        "qwen3",
        "<think>\nso\n</think>\n\nYes <think>",
        [Reasoning("\nso\n"), Text("Yes <think>")],
    ),
    (None, "qwen3", " <thin air</think>", [Text(" <thin air</think>")]),
    (
        "hermes",
        "qwen3",
        f"<think><tool_call></think><tool_call>{CALL}</tool_call>",
        [Reasoning("<tool_call>"), *ADD],
    ),
    (None, None, "plain", [Text("plain")]),
]


def read(pieces, tools, reasoning):
    parser = make_parser(tools=tools, reasoning=reasoning)
    told = [parser.push(piece) for piece in pieces]
    return coalesced(event for events in [*told, parser.finish()] for event in events)


@pytest.mark.parametrize(("tools", "reasoning", "text", "events"), CASES)
def test_what_is_read_whole_and_letter_by_letter(tools, reasoning, text, events):
    assert read([text], tools, reasoning) == events
    assert read(list(text), tools, reasoning) == events


MARKERS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<think>", "</think>", V3, CALL, '{"name":', '"f"', '"arguments":', "{", "}", "[", "]"),
    *('"', "\\", ",", ";", ":", " ", "\n", "x", "1", "é"),
]


@settings(max_examples=200)
@given(
    text=st.lists(st.sampled_from(MARKERS), max_size=12).map("".join),
    tools=st.sampled_from([None, *TOOL_PARSERS]),
    reasoning=st.sampled_from([None, *REASONING_PARSERS]),
    data=st.data(),
)
def test_where_the_text_is_cut_makes_no_difference(text, tools, reasoning, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    events = read(pieces, tools, reasoning)
    assert events == read([text], tools, reasoning)
    numbers = [event.index for event in events if isinstance(event, ToolCall)]
    assert numbers == list(range(len(numbers)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(max_examples=100)
@given(
    arguments=st.dictionaries(st.text(max_size=5), json_values, max_size=4),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
def test_any_arguments_arrive(arguments, ascii_only, indent):
    written = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    call = f'{{"name": "f", "arguments": {written}}}'
    for tools, text in {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "llama3_json": call,
        "mistral": f"[TOOL_CALLS]f{written}",
        "deepseek_v3": V3.replace(ARGUMENTS, written),
    }.items():
        _, pieces, *_ = read(list(text), tools, None)
        assert pieces.text == written


def test_arguments_are_told_as_they_come_and_markers_never_in_part():
    parser = make_parser(tools="hermes")
    assert parser.push("Hi <tool") == [Text("Hi ")]
    assert parser.push('_call>{"name": "f", "argum') == [ToolCall(0, "f")]
    assert parser.push('ents": {"city": "Par') == [Arguments(0, '{"city": "Par')]
    assert parser.push('is"}}\n</tool_') == [Arguments(0, 'is"}')]
    assert parser.push("call>") == parser.finish() == []


def test_names_are_checked_and_special_tokens_asked_for():
    assert make_parser(tools="mistral").needs_special_tokens
    assert not make_parser(tools="hermes", reasoning="qwen3").needs_special_tokens
    with pytest.raises(ConfigError, match="tool_call_parser must be one of hermes"):
        make_parser(tools="pythonic")
    with pytest.raises(ConfigError, match="reasoning_parser"):
        make_parser(reasoning="r1")


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize("text", ["word " * 200_000, "<think>" + "so " * 300_000])
def test_long_answers_are_read_in_no_time(name, text):
    """They are read in the event loop, where a million characters one by one take seconds."""
    parser = make_parser(tools=name, reasoning="qwen3")
    began = time.monotonic()
    told = [*parser.push(text), *parser.finish()]
    assert time.monotonic() - began < 0.5
    assert sum(len(event.text) for event in told) >= 900_000
