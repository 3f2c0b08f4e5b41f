"""What vLLM's and SGLang's clients send and read beyond OpenAI's: done, or refused by name."""

import json

import pytest

from jaxgen.serving.protocol.sampling import SamplingFields
from jaxgen.serving.routes import native_request
from tests.serving.test_errors import error_of
from tests.serving.test_streams import events

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {"/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": CHAT}
routes = pytest.mark.parametrize("path", BODIES)


def native(client, **body):
    return client.post("/generate", json={"text": "hi", **body})


def asked_last(client):
    """The ids and the parameters that the engine was asked with."""
    _, prompt, params = client.app.state.serving.engine.asked[-1]
    return list(prompt), params


def test_token_ids_in_a_completion_stream(ask):
    """Those of a choice's prompt come with its first chunk only."""
    body = {"prompt": [[5, 6], [7]], "n": 2, "stream": True, "return_token_ids": True}
    told = [event["choices"][0] for event in events(ask().post("/v1/completions", json=body))]
    for index, prompt in enumerate([[5, 6], [5, 6], [7], [7]]):
        mine = [choice for choice in told if choice["index"] == index]
        assert [choice.get("prompt_token_ids") for choice in mine] == [prompt, None, None]
        assert [token for choice in mine for token in choice["token_ids"]] == [3, 4, 5]


def test_token_ids_beside_an_echo(ask):
    body = {"prompt": [5, 6], "stream": True, "return_token_ids": True, "echo": True}
    told = [event["choices"][0] for event in events(ask().post("/v1/completions", json=body))]
    assert [choice.get("prompt_token_ids") for choice in told] == [[5, 6], None, None, None]
    assert [choice["token_ids"] for choice in told] == [[], [3], [4], [5]]


def test_token_ids_in_a_chat_stream_are_beside_the_first_choices(ask):
    body = {**CHAT, "n": 2, "stream": True, "return_token_ids": True}
    first, *rest = events(ask().post("/v1/chat/completions", json=body))
    assert len(first["prompt_token_ids"]) > 3
    assert all("prompt_token_ids" not in chunk for chunk in rest)
    assert "prompt_token_ids" not in first["choices"][0]


@routes
def test_what_was_not_asked_for_is_null_and_not_missing(ask, path):
    answer = ask().post(path, json=BODIES[path]).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] is choice["logprobs"] is choice["matched_stop"] is None
    holder = answer if "chat" in path else choice
    assert holder["prompt_token_ids"] is holder["prompt_logprobs"] is None
    if "chat" in path:
        assert choice["message"]["reasoning"] is choice["message"]["refusal"] is None


@pytest.mark.parametrize(
    ("ending", "max_tokens", "matched"),
    [
        ((2, None), 9, 2),  # EOS
        ((70, 70), 9, 70),  # a stop id
        ((70, "x"), 9, "x"),
        ((70, None), 9, None),  # a grammar's end
        ((70, None), 3, None),  # full length
    ],
)
def test_what_was_matched_is_told_everywhere(ask, ending, max_tokens, matched):
    client = ask()
    client.app.state.serving.engine.ending = ending
    for path, body in BODIES.items():
        asked = {**body, "max_tokens": max_tokens}
        (choice,) = client.post(path, json=asked).json()["choices"]
        (last,) = events(client.post(path, json={**asked, "stream": True}))[-1]["choices"]
        assert choice["matched_stop"] == last["matched_stop"] == matched
    reason = native(client, sampling_params={"max_new_tokens": 9}).json()["meta_info"]
    assert reason["finish_reason"]["matched"] == (matched if max_tokens == 9 else None)


def test_a_text_that_has_its_first_token_gets_no_second(ask):
    """What a client has rendered with a template begins with BOS as text."""
    client = ask()
    tokenizer = client.app.state.serving.engine.tokenizer
    bare = tokenizer.encode("hi", add_special_tokens=False)
    rendered = tokenizer.special_tokens["bos_token"] + "hi"
    for text, asked, ids in (
        ("hi", {}, [tokenizer.bos_id, *bare]),
        ("hi", {"add_special_tokens": False}, bare),
        (rendered, {"add_special_tokens": False}, [tokenizer.bos_id, *bare]),
    ):
        told = client.post("/v1/completions", json={"prompt": text, **asked})
        assert told.status_code == 200
        assert asked_last(client)[0] == ids
    chat = {**CHAT, "chat_template": "hi"}
    client = ask(trust_request_chat_template=True)
    for asked, ids in (({}, bare), ({"add_special_tokens": True}, [tokenizer.bos_id, *bare])):
        assert client.post("/v1/chat/completions", json={**chat, **asked}).status_code == 200
        assert asked_last(client)[0] == ids


def test_sides_of_truncation(ask):
    client = ask()
    for side, kept in (("left", [8, 9]), ("right", [5, 6]), (None, [8, 9])):
        body = {"prompt": [5, 6, 7, 8, 9], "truncate_prompt_tokens": 2, "truncation_side": side}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert asked_last(client)[0] == kept
    echoed = client.post("/v1/completions", json={**body, "prompt": "hi there you", "echo": True})
    assert "hi" not in echoed.json()["choices"][0]["text"]


def test_truncation_to_the_context_leaves_room_for_the_answer(ask):
    client = ask()
    for path, wanted, kept in (
        ("/v1/completions", 100, 156),
        ("/v1/completions", None, 240),  # 16 are usual
        ("/v1/chat/completions", 100, 156),
        ("/v1/chat/completions", None, 255),
    ):
        text = {"messages": [{"role": "user", "content": "z " * 300}], "prompt": "z " * 300}
        body = {**text, "truncate_prompt_tokens": -1, "max_tokens": wanted}
        assert client.post(path, json=body).status_code == 200
        assert len(asked_last(client)[0]) == kept


@routes
def test_the_servers_usual_number_of_tokens(ask, path):
    """--override-generation-config says it; a request that says another gets that."""
    client = ask(sampling_defaults={"max_tokens": 7})
    for asked, got in (({}, 7), ({"max_tokens": None}, 7), ({"max_tokens": 20}, 20)):
        assert client.post(path, json={**BODIES[path], **asked}).status_code == 200
        assert asked_last(client)[1].max_tokens == got
    many = ask(sampling_defaults={"max_tokens": 1000})
    assert many.post(path, json=BODIES[path]).status_code == 200
    prompt, params = asked_last(many)
    assert len(prompt) + params.max_tokens == 256


@routes
def test_sglangs_fields_for_forms(ask, path):
    client = ask()
    for field, kind in (("regex", "regex"), ("ebnf", "grammar")):
        assert client.post(path, json={**BODIES[path], field: "a"}).status_code == 200
        assert asked_last(client)[1].structured_outputs.kind == kind


@routes
def test_known_fields_are_refused_by_name(ask, path):
    client = ask()
    for field in SamplingFields.refused:
        asked = {**BODIES[path], field: "asked for"}
        assert error_of(client.post(path, json=asked))["param"] == field
    for nothing in (None, False, "", [], {}):
        asked = {**BODIES[path], **dict.fromkeys(SamplingFields.refused, nothing)}
        assert client.post(path, json=asked).status_code == 200


def test_sglangs_fields_are_refused_by_name(ask):
    client = ask()
    for field in native_request.REFUSED:
        assert error_of(native(client, **{field: "asked for"}))["param"] == field


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens", "from 1"),
        ({"stop_regex": "a+"}, "stop_regex", "use stop"),
        ({"max_tokens": 4}, "max_tokens", "max_new_tokens"),
        ({"json_schema": '{"type"'}, "structured_outputs", "JSON"),
        ({"json_schema": "{}", "regex": "a"}, "sampling_params", "one of json_schema and regex"),
        ({"temperature": 9}, "temperature", "[0, 2]"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias", "token ids to numbers"),
    ],
)
def test_sglangs_parameters_have_their_own_names(ask, params, param, message):
    error = error_of(native(ask(), sampling_params=params))
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("start", [-1, 0])
def test_sglangs_number_of_logprobs_has_its_own_name(ask, start):
    for count in (21, -1):
        asked = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": count}
        error = error_of(native(ask(), **asked))
        assert error["param"] == "top_logprobs_num"
        assert error["message"].startswith("top_logprobs_num must be")


def test_sglangs_prompt_alone(ask):
    """max_new_tokens 0: the prompt's logprobs, and nothing new."""
    client = ask()
    body = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 1}
    body |= {"input_ids": [5, 6, 7], "text": None, "return_text_in_logprobs": True}
    told = native(client, **body, sampling_params={"max_new_tokens": 0}).json()
    assert (told["text"], told["output_ids"]) == ("", [])
    meta = told["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["output_token_logprobs"] == meta["output_top_logprobs"] == []
    tokenizer = client.app.state.serving.engine.tokenizer
    named = [[-1.5, token, tokenizer.token_text(token)] for token in (6, 7)]
    assert meta["input_token_logprobs"] == named
    assert meta["input_top_logprobs"] == [[entry] for entry in named]
    body |= {"logprob_start_len": 0, "return_text_in_logprobs": False, "top_logprobs_num": 0}
    meta = native(client, **body).json()["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, 5, None]
    assert "input_top_logprobs" not in meta
    assert len(meta["output_token_logprobs"]) == 3


def test_sglangs_other_options(ask):
    client = ask()
    params = {"no_stop_trim": True, "stop": ["x"], "min_new_tokens": 1, "sampling_seed": 3}
    assert native(client, sampling_params=params, priority=7, extra_key="me").status_code == 200
    _, asked = asked_last(client)
    assert asked.include_stop_str_in_output
    assert (asked.stop, asked.min_tokens, asked.seed, asked.max_tokens) == (("x",), 1, 3, 128)
    assert client.app.state.serving.engine.ranked[-1] == (-7, "me")


def test_routes_by_their_other_names(ask):
    client = ask()
    assert client.get("/flush_cache").json() == {"success": True}
    assert client.get("/model_info").json() == client.get("/get_model_info").json()
    assert client.get("/server_info").json()["version"]
    ids = client.post("/v1/tokenize", json={"prompt": "hi"}).json()["tokens"]
    assert "hi" in client.post("/v1/detokenize", json={"tokens": ids}).json()["text"]


def test_effort_of_reasoning_reaches_the_template(ask):
    template = "{{ reasoning_effort }} {{ enable_thinking }}"
    client = ask(trust_request_chat_template=True)
    told = []
    for effort in ("none", "high"):
        body = {**CHAT, "chat_template": template, "reasoning_effort": effort}
        client.post("/v1/chat/completions", json=body)
        told.append(client.app.state.serving.engine.tokenizer.decode(asked_last(client)[0]))
    assert json.dumps(told) == '["none False", "high True"]'


def test_variables_of_the_template_have_defaults(ask):
    template = "{{ enable_thinking }} {{ mood }}"
    given = {"enable_thinking": False, "mood": "calm"}
    client = ask(trust_request_chat_template=True, chat_template_defaults=given)
    told = []
    for kwargs in ({}, {"enable_thinking": True}):
        body = {**CHAT, "chat_template": template, "chat_template_kwargs": kwargs}
        client.post("/v1/chat/completions", json=body)
        told.append(client.app.state.serving.engine.tokenizer.decode(asked_last(client)[0]))
    assert told == ["False calm", "True calm"]


def test_a_server_may_ask_for_its_clients(ask):
    client = ask(return_tokens_as_token_ids=True, force_usage=True)
    for path, body in BODIES.items():
        asked = {**body, "logprobs": 1 if "prompt" in body else True, "stream": True}
        *chunks, last = events(client.post(path, json=asked))
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 3
        assert "token_id:3" in json.dumps(chunks)
