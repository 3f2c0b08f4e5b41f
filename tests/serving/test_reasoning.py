"""A form that is asked for is the answer's: what a model thinks before it is free."""

import numpy as np
import pytest

from jaxgen.grammar.compiler import GrammarCompiler
from jaxgen.grammar.token_mask import words_of
from jaxgen.sampling import InvalidParameter
from jaxgen.sampling.structured import StructuredOutputs

VOCAB = 512
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
FORM = {"response_format": {"type": "json_object"}}


def allowed(rule):
    mask = np.full(words_of(VOCAB), -1, np.int32)
    rule.write(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.fixture
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, VOCAB, [2])


def test_thoughts_are_free_and_the_answer_is_not(compiler, tokenizer):
    plain = compiler.compile(StructuredOutputs(regex="[ab]+"))
    rule = compiler.compile(StructuredOutputs(regex="[ab]+", after="</think>"))
    first = allowed(plain)
    assert len(first) < VOCAB
    for token in tokenizer.encode_inside("so </thi</think"):  # several tokens spell the mark
        assert len(allowed(rule)) == VOCAB
        rule.advance(token)
        assert not rule.ended
    twin = rule.copy()
    for token in tokenizer.encode_inside(">"):
        rule.advance(token)
    assert allowed(rule) == first
    assert len(allowed(twin)) == VOCAB
    fresh = compiler.compile(StructuredOutputs(regex="[ab]+", after="</think>"))
    assert len(allowed(fresh)) == VOCAB  # what was compiled before stands at its beginning


def test_a_mark_may_open_the_thoughts_or_not(compiler, tokenizer):
    mark = tokenizer.special_tokens["bos_token"]  # any token of its own
    wanted = StructuredOutputs(regex="[ab]+", after="</think>", opening=mark)
    first = allowed(compiler.compile(StructuredOutputs(regex="[ab]+")))
    rule = compiler.compile(wanted)
    assert allowed(rule) == first | {tokenizer.bos_id}
    answering, thinking = rule.copy(), rule.copy()
    answering.advance(tokenizer.encode_inside("a")[0])
    assert tokenizer.bos_id not in allowed(answering)
    thinking.advance(tokenizer.bos_id)
    assert len(allowed(thinking)) == VOCAB
    unknown = compiler.compile(StructuredOutputs(regex="[ab]+", after="x", opening="<nothing>"))
    assert allowed(unknown) == first
    with pytest.raises(InvalidParameter, match="opening needs after"):
        StructuredOutputs(regex="a", opening="<think>")
    with pytest.raises(InvalidParameter, match="256 characters"):
        StructuredOutputs(regex="a", after="x" * 257)


@pytest.mark.parametrize(
    ("parser", "opening"), [("deepseek_r1", None), ("qwen3", "<think>"), (None, None)]
)
def test_the_reasoning_parser_says_where_the_answer_begins(ask, parser, opening):
    client = ask(reasoning_parser=parser)
    assert client.post("/v1/chat/completions", json=CHAT | FORM).status_code == 200
    (_, _, params), *_ = client.app.state.serving.engine.asked
    assert params.structured_outputs.after == (None if parser is None else "</think>")
    assert params.structured_outputs.opening == opening


def test_thoughts_that_the_template_has_ended(ask):
    template = "{{ messages[0].content }}<think></think>\n\n"
    client = ask(("{}",), reasoning_parser="deepseek_r1", trust_request_chat_template=True)
    told = client.post("/v1/chat/completions", json=CHAT | FORM | {"chat_template": template})
    assert told.json()["choices"][0]["message"]["content"] == "{}"
    (_, _, params), *_ = client.app.state.serving.engine.asked
    assert params.structured_outputs.after is None


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
def test_thoughts_that_the_template_has_begun(ask, parser):
    template = "{{ messages[0].content }}<think>\n"
    texts = ("so", "</think>", "{}")
    client = ask(texts, reasoning_parser=parser, trust_request_chat_template=True)
    told = client.post("/v1/chat/completions", json=CHAT | FORM | {"chat_template": template})
    message = told.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("so", "{}")
    (_, _, params), *_ = client.app.state.serving.engine.asked
    wanted = params.structured_outputs
    assert (wanted.after, wanted.opening) == ("</think>", None)


def test_a_required_call_may_be_thought_about(ask):
    tool = {"type": "function", "function": {"name": "f"}}
    texts = ("it is f", "</think>", '[{"name": "f", "parameters": {"a": 1}}]')
    client = ask(texts, reasoning_parser="deepseek_r1")
    body = CHAT | {"tools": [tool], "tool_choice": "required"}
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["reasoning"] == "it is f"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
