"""Faults that other servers had, asked of a byte-level vocabulary whose characters take tokens.

One token's embedding is NaN, and twelve ids are no token at all, as where vocabularies are padded.
"""

import json
import shutil
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxgen.grammar.compiler import GrammarCompiler
from jaxgen.grammar.matcher import Matcher
from jaxgen.grammar.token_mask import words_of
from jaxgen.sampling import StructuredOutputs
from jaxgen.text import load_tokenizer
from jaxgen_checkpoints.errors import CheckpointWarning
from tests.serving.conftest import serving_llama
from tests.serving.live import post

TEXT = "one\n\n\ntwo 🙂🎉é今 end"
SAID = {"structured_outputs": {"choice": [TEXT]}, "max_tokens": 60}
HI = [{"role": "user", "content": "hi"}]
EOS, NO_TOKEN, POISON = 499, 505, 507


@pytest.fixture(scope="module")
def qwen(golden_dir):
    return load_tokenizer(golden_dir("qwen2"), vocab_size=512)


@pytest.fixture(scope="module")
def server(golden_dir, tmp_path_factory):
    folder = shutil.copytree(golden_dir("qwen2"), tmp_path_factory.mktemp("qwen") / "poisoned")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.embed_tokens.weight" in tensors:
            tensors["model.embed_tokens.weight"][POISON] = np.nan
            save_file(tensors, file, metadata={"format": "pt"})
    with (
        pytest.warns(CheckpointWarning, match="not finite"),
        serving_llama(folder, num_gpu_blocks_override=7) as live,
    ):
        yield live


def answer(server, path, **body):
    told = post(server, path, body)
    assert told.status_code == 200, told.text
    return told.json()


def chunks(server, path, **body):
    """All data events of a stream but [DONE]."""
    told = post(server, path, body | {"stream": True})
    assert told.status_code == 200, told.text
    *events, done = [line[6:] for line in told.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def error_of(server, path, status=400, **body):
    told = post(server, path, body)
    assert told.status_code == status, told.text
    return told.json()["error"]


@pytest.mark.parametrize("stop", ["\n\n", "e\n\n\nt", "🎉é", "今 e", "\n\n\n\n", "\ufffd"])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_streams_whatever_the_tokens_are(server, stop, include):
    asked = SAID | {"stop": ["never", stop], "include_stop_str_in_output": include}
    found = TEXT.find(stop)
    wanted = TEXT if found < 0 else TEXT[: found + (len(stop) if include else 0)]
    whole = answer(server, "/v1/completions", prompt="hi", **asked)["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (wanted, "stop")
    assert whole["stop_reason"] == (None if found < 0 else stop)
    *pieces, last = chunks(server, "/v1/completions", prompt="hi", **asked)
    texts = [chunk["choices"][0]["text"] for chunk in pieces]
    assert all(texts)  # nothing is sent while text is held back
    assert not any("\ufffd" in text for text in texts)
    assert "".join(texts) + last["choices"][0]["text"] == wanted
    assert last["choices"][0]["finish_reason"] == "stop"
    deltas = [
        chunk["choices"][0]
        for chunk in chunks(server, "/v1/chat/completions", messages=HI, **asked)
    ]
    assert "".join(each["delta"].get("content", "") for each in deltas) == wanted
    assert all(each["delta"]["content"] for each in deltas[1:-1])
    assert [each["finish_reason"] for each in deltas[-2:]] == [None, "stop"]
    assert deltas[-1]["delta"] == {}


def test_logprobs_of_pieces_of_characters(server, qwen):
    asked = SAID | {"messages": HI, "logprobs": True, "top_logprobs": 20}
    (choice,) = answer(server, "/v1/chat/completions", **asked)["choices"]
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == TEXT
    for entry in entries:
        assert len(entry["top_logprobs"]) == 20
        for each in entry["top_logprobs"]:
            assert each["token"]
            assert bytes(each["bytes"]).decode(errors="replace") == (
                each["token"] if each["bytes"] else ""
            )
    streamed = [
        entry
        for chunk in chunks(server, "/v1/chat/completions", **asked)
        for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", ())
    ]
    assert streamed == entries
    (choice,) = answer(server, "/v1/completions", prompt="hi", logprobs=20, **SAID)["choices"]
    told = choice["logprobs"]
    assert len(told["tokens"]) == len(qwen.encode(TEXT))
    for offset, name, top in zip(
        told["text_offset"], told["tokens"], told["top_logprobs"], strict=True
    ):
        assert TEXT.startswith(name, offset) or name == "\ufffd"
        assert name in top


def test_an_end_token_has_its_name_beside_its_logprob(server):
    asked = {"allowed_token_ids": [EOS], "max_tokens": 2}
    echoed = {"prompt": [5, EOS, 6], "echo": True, "logprobs": 1}
    (choice,) = answer(server, "/v1/completions", **echoed, **asked)["choices"]
    assert choice["text"] == "&'"
    assert choice["logprobs"]["tokens"] == ["&", "<|im_end|>", "'", "<|im_end|>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]
    asked |= {"logprobs": True, "top_logprobs": 0, "messages": HI}
    (choice,) = answer(server, "/v1/chat/completions", **asked)["choices"]
    assert choice["message"]["content"] == ""
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token"], bytes(entry["bytes"])) == ("<|im_end|>", b"<|im_end|>")


def test_ids_that_are_no_token_have_a_name_and_no_place_in_a_grammar(server, qwen):
    forced = {"logit_bias": {str(NO_TOKEN): 100}, "temperature": 0, "max_tokens": 2}
    (choice,) = answer(server, "/v1/completions", prompt="hi", logprobs=0, **forced)["choices"]
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == [f"token_id:{NO_TOKEN}"] * 2
    rule = GrammarCompiler(qwen, 512, [EOS]).compile(StructuredOutputs(regex="(.|\n)*"))
    mask = np.full(words_of(512), -1, np.int32)
    rule.write(mask)
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
    assert allowed[: qwen.size].sum() > 400  # all but what is no UTF-8
    assert not allowed[qwen.size :].any()


@pytest.mark.parametrize(
    ("path", "body", "prompt", "limit"),
    [
        ("/v1/completions", {"prompt": "PROMPT"}, "prompt", "max_tokens"),
        ("/v1/chat/completions", {"messages": "PROMPT"}, "messages", "max_tokens"),
        ("/v1/chat/completions", {"messages": "PROMPT"}, "messages", "max_completion_tokens"),
        ("/v1/responses", {"input": "PROMPT"}, "input", "max_output_tokens"),
        ("/generate", {"text": "PROMPT"}, "text", "max_new_tokens"),
        ("/generate", {"input_ids": "PROMPT"}, "input_ids", "max_new_tokens"),
        ("/mii/llama", {"prompts": "PROMPT"}, "prompts", "max_new_tokens"),
    ],
)
def test_too_much_is_told_by_the_names_that_the_client_used(server, path, body, prompt, limit):
    (field,) = body

    def filled(text, tokens):
        value = [5] * len(text) if field == "input_ids" else text
        value = [{"role": "user", "content": text}] if field == "messages" else value
        asked = {field: value}
        if path == "/generate":
            return asked | {"sampling_params": {limit: tokens}}
        return asked | {limit: tokens}

    for text, tokens, param in (("aé!", 96, limit), ("!" * 97, 1, prompt), ("x" * 9999, 1, prompt)):
        error = error_of(server, path, **filled(text, tokens))
        assert error["param"] == param
        assert "96 tokens" in error["message"]
        assert (limit in error["message"]) is (param == limit)


def test_what_was_not_asked_for_gives_way_to_the_context(server):
    asked = {"temperature": 0, "ignore_eos": True}
    (choice,) = answer(server, "/v1/completions", prompt=[5] * 90, **asked)["choices"]
    assert choice["finish_reason"] == "length"
    several = answer(server, "/v1/completions", prompt=[[5] * 92, [5]], **asked)
    assert several["usage"]["completion_tokens"] == 8
    told = answer(server, "/generate", input_ids=[5] * 20, sampling_params=asked)
    assert told["meta_info"]["completion_tokens"] == 76
    error = error_of(server, "/v1/completions", prompt=[5] * 90, max_tokens=16)
    assert error["param"] == "max_tokens"


def test_an_empty_text_is_one_alone_or_in_a_list(server, served):
    """With a token at its beginning it can be continued, without it cannot, and only then."""
    for prompt in ("", [""], ["", ""]):
        assert post(served, "/v1/completions", {"prompt": prompt}).status_code == 200
        assert error_of(server, "/v1/completions", prompt=prompt)["param"] == "prompt"


def test_more_than_the_whole_cache_is_refused_and_nobody_waits_behind_it(golden_dir):
    """Five blocks of sixteen, where the context has six; no step is run, so none is compiled."""
    sizes = {"num_gpu_blocks_override": 5, "enforce_eager": True}
    with serving_llama(golden_dir("qwen2"), **sizes) as small:
        for n in (1, 2):
            asked = {"prompt": [5] * 60, "max_tokens": 30, "n": n}
            error = error_of(small, "/v1/completions", **asked)
            assert "81 tokens. The prompt has 60" in error["message"]
        assert small.serving.engine.stats().waiting == small.serving.active == 0


@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_not_finite_are_an_error_and_nobody_elses(server, stream):
    asked = {"max_tokens": 3, "stream": stream, "temperature": 0, "ignore_eos": True}
    for path, body in (
        ("/v1/completions", {"prompt": [5, POISON]}),
        ("/generate", {"input_ids": [5, POISON], "sampling_params": {"max_new_tokens": 3}}),
    ):
        error = error_of(server, path, status=500, **{**asked, **body})
        assert "not finite" in error["message"]
    assert answer(server, "/v1/completions", **{**asked, "stream": False}, prompt=[5, 6])
    asked["prompt"] = [[5, 6], [POISON]]
    if not stream:
        assert "not finite" in error_of(server, "/v1/completions", 500, **asked)["message"]
        return
    *good, bad = chunks(server, "/v1/completions", **asked)
    assert {chunk["choices"][0]["index"] for chunk in good} == {0}
    assert bad["error"]["code"] == 500


def test_who_forbids_everything_is_refused_and_the_model_is_not_to_blame(server, qwen):
    (letter,) = qwen.encode("b")
    before = server.serving.engine.stats().corrupted
    form = {"structured_outputs": {"regex": "b{9}"}}
    for rules in (
        {"allowed_token_ids": [5]},
        {"allowed_token_ids": list(range(400, 490))},
        {"stop_token_ids": [letter], "min_tokens": 4},
        {"bad_words": ["b"]},
    ):
        for asked in (form | rules, form | rules | {"stream": True}):
            told = post(server, "/v1/completions", {"prompt": "hi", **asked})
            assert told.status_code == 400, told.text
            assert "forbid" in told.json()["error"]["message"]
    assert server.serving.engine.stats().corrupted == before


def test_a_rule_that_breaks_ends_its_request_alone(server, monkeypatch):
    """Whatever a library raises: the loop that all share goes on."""
    write, calls = Matcher.write, []

    def breaking(matcher, mask):
        calls.append(matcher)
        if len(calls) == 3:
            raise KeyError("deep inside")
        write(matcher, mask)

    monkeypatch.setattr(Matcher, "write", breaking)
    error = error_of(server, "/v1/completions", 500, prompt="hi", **SAID)
    assert "mask" in error["message"]
    monkeypatch.undo()
    assert answer(server, "/v1/completions", prompt="hi", **SAID)["choices"][0]["text"] == TEXT
    assert server.serving.engine.healthy


def test_a_form_that_takes_too_long_is_refused_and_may_be_asked_for_again(server, monkeypatch):
    def slow(compiler, wanted):
        time.sleep(0.3)
        raise AssertionError("nobody waits for this")

    monkeypatch.setattr("jaxgen.serving.async_engine.LONGEST_COMPILE", 0.05)
    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    error = error_of(server, "/v1/completions", prompt="hi", **SAID)
    assert error["param"] == "structured_outputs"
    monkeypatch.undo()
    assert answer(server, "/v1/completions", prompt="hi", **SAID)["choices"][0]["text"] == TEXT
