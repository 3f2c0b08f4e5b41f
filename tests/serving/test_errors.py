"""What is wrong with a request is told in OpenAI's form, with the field that is at fault."""

import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
DEEP: object = "x"
for _ in range(70):
    DEEP = [DEEP]


def defining(definitions):
    """A tool whose parameters have these definitions."""
    return {"type": "function", "function": {"name": "f", "parameters": {"$defs": definitions}}}


def error_of(response, status=400):
    """The error object, which every refusal has."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"temperature": 3}, "temperature", "[0, 2]"),
        ({"temperature": "warm"}, "temperature", "valid number"),
        ({"temperature": True}, "temperature", "not true or false"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"n": 0}, "n", "from 1"),
        ({"n": 2, "temperature": 0}, "n", "greedily"),
        ({"n": 2000}, "n", "at most 1024"),
        ({"max_tokens": 0}, "max_tokens", "from 1"),
        ({"max_tokens": 300}, "max_tokens", "lower max_tokens to 253"),
        ({"prompt": "a " * 300}, "prompt", "shorten the prompt"),
        ({"prompt": "a" * 40_000}, "prompt", "cannot be that short"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [1, 512]}, "prompt", "0 to 511"),
        ({"prompt": [-1]}, "prompt", "prompt.0: Input should be greater"),
        ({"prompt": [[1], [1, -1]]}, "prompt", "prompt.1.1: Input should be greater"),
        ({"prompt": None}, "prompt", "must be a text, token ids, or a list"),
        ({"prompt": ["a", [1]]}, "prompt", "must be a text, token ids, or a list"),
        ({"stop": ["a", 1]}, "stop", "must be a text or a list of texts"),
        ({"temperature": "a", "top_p": "b"}, "temperature", "and 1 more fields"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "positive"),
        ({"priority": 2**63}, "priority", "less than"),
        ({"regex": "a", "ebnf": "root ::= a"}, "regex", "ebnf exclude"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format", "regex"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"stop": ["a"] * 257}, "stop", "at most 256"),
        ({"bad_words": ["a"] * 257}, "bad_words", "at most 256"),
        ({"stop": ["a", "a" * 4097]}, "stop", "at most 4096 characters"),
        ({"bad_words": ["a" * 4097]}, "bad_words", "at most 4096 characters"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "structured_outputs"),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"cache_salt": ""}, "cache_salt", ""),
    ],
)
def test_completions_name_the_field(ask, body, param, message):
    error = error_of(ask().post("/v1/completions", json={"prompt": "hi", **body}))
    assert error["param"] == param
    assert message in error["message"]
    assert error["type"] == "BadRequestError"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", ""),
        ({"messages": [{"content": "a"}]}, "messages", "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages", "content is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "'image_url'",
        ),
        ({"messages": [{"role": "assistant", "content": "a"}]}, None, "roles must alternate"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"tools": []}, "tools", "empty"),
        ({"tools": [TOOL]}, "tool_choice", "--enable-auto-tool-choice"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "then"}},
            },
            "tool_choice",
            "'then'",
        ),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "must be none, auto"),
        ({"chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "tools"),
        ({"chat_template_kwargs": {"self": 1}}, None, "the chat template failed"),
        ({"tools": [defining(5)], "tool_choice": "required"}, "tools", "$defs that are no object"),
        (
            {"tools": [defining({"a": {}}), defining({"a": True})], "tool_choice": "required"},
            "tools",
            "'a' in their $defs",
        ),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        ({"functions": [{}]}, "functions", "tools"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"max_tokens": 0}, "max_tokens", "from 1"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens", "from 1"),
        ({"verbosity": "low"}, "verbosity", "not supported"),
        ({"web_search_options": {"user_location": 1}}, "web_search_options", "not supported"),
    ],
)
def test_chat_names_the_field(ask, body, param, message):
    error = error_of(ask().post("/v1/chat/completions", json={**CHAT, **body}))
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("include", ["message.output_text.logprobs"]),
        ("top_logprobs", 3),
        ("truncation", "auto"),
        ("stream_options", {"include_obfuscation": True}),
        ("conversation", "conv_1"),
        ("temperature", 3),
        ("input", []),
        ("input", [{"content": "a"}]),
        ("input", [{"role": "user"}]),
        ("input", [{"role": "user", "content": 5}]),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}]),
        ("input", [{"type": "function_call", "arguments": "{}"}]),
        ("input", [{"type": "function_call_output", "output": 5}]),
    ],
)
def test_responses_name_the_field(ask, field, value):
    client = ask()
    assert (
        error_of(client.post("/v1/responses", json={"input": "hi", field: value}))["param"] == field
    )
    none = {"input": "hi", "truncation": "disabled", "include": [], "background": False}
    assert client.post("/v1/responses", json=none).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("stop", each) for each in (1.5, {"a": 1}, [3], True)),
        *((name, "a") for name in ("max_length", "max_new_tokens", "temperature", "top_k")),
        *((name, [1]) for name in ("max_length", "min_new_tokens", "seed", "top_p")),
        *((name, "no") for name in ("ignore_eos", "do_sample", "return_full_text")),
        ("no_such", 1),
    ],
)
def test_mii_names_the_field(ask, field, value):
    body = {"prompts": "hi", "max_length": 9, field: value}
    assert error_of(ask().post("/mii/stub", json=body))["param"] == field


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"temperature": NaN, "prompt": "a"}', "not a JSON number"),
        (b'{"temperature": 1e400, "prompt": "a"}', "1e400 is more than"),
        (b'{"metadata": {"a": [-1e999]}, "input": "a"}', "-1e999 is more than"),
        (b'{"user": "\xed\xa0\x80"}', "not valid JSON"),
        ('{"user": "\\ud800"}'.encode("utf-16"), "not valid JSON"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"user": "\\ud800"}', "surrogate"),
        (b'{"user": {"\\udfff": 1}}', "surrogate"),
        (b"[" * 100_000, "nested deeper than 64"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "nested deeper than 64"),
    ],
)
def test_bodies_that_are_none(ask, path, body, message):
    headers = {"content-type": "application/json"}
    error = error_of(ask().post(path, content=body, headers=headers))
    assert message in error["message"]


def test_a_pair_of_surrogates_is_text(ask):
    headers = {"content-type": "application/json; charset=utf-8"}
    body = b'{"prompt": "\\ud83d\\ude00"}'
    assert ask().post("/v1/completions", content=body, headers=headers).status_code == 200


def test_other_statuses(ask):
    client = ask(served_model_names=("here",))
    error = error_of(client.post("/v1/completions", json={"prompt": "a", "model": "there"}), 404)
    assert error["param"] == "model"
    assert "here" in error["message"]
    error_of(client.get("/v1/models/there"), 404)
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.get("/v1/completions"), 405)
    error_of(client.post("/v1/completions", content=b"prompt=a"), 415)
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    error_of(client.post("/v1/completions", content=b"", headers=packed), 415)


def test_nulls_and_strangers_are_as_if_not_given(ask):
    client = ask()
    body = {"prompt": "hi", "max_tokens": None, "temperature": None, "stop": None, "logprobs": None}
    answer = client.post("/v1/completions", json={**body, "stream": None, "no_such_field": [1]})
    assert answer.status_code == 200
    (_, _, params) = client.app.state.serving.engine.asked[-1]
    assert (params.max_tokens, params.temperature, params.stop) == (16, 1.0, ())


def test_a_failure_of_ours_is_told_without_details(ask, caplog):
    client = ask()
    engine = client.app.state.serving.engine
    engine.fail_with = RuntimeError("secret detail")
    for stream in (False, True):
        error = error_of(
            client.post("/v1/completions", json={"prompt": "hi", "stream": stream}), 500
        )
        assert "secret" not in error["message"]
    assert "secret detail" in caplog.text  # the log has it
    engine.fail_with = None
    assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/embeddings", "generate text"),
        ("/v1/responses/resp_1", "nothing is stored"),
        ("/v1/responses/resp_1/cancel", "nothing is stored"),
        ("/v1/audio/speech", "text only"),
        ("/wake_up", "does not sleep"),
        ("/pause_generation", "not paused"),
        ("/invocations", "not served"),
        ("/collective_rpc", "internals"),
    ],
)
def test_routes_that_are_elsewhere_say_why_they_are_not_here(ask, path, why):
    answer = ask().post(path, json={})
    assert answer.status_code == 501
    assert why in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "NotImplementedError"


def test_health_by_other_names(ask):
    client = ask()
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200
    assert client.get("/health_generate").json() == {"status": "ok"}
    assert client.get("/load").json() == {"server_load": 0}
    assert client.get("/get_server_info").json()["internal_states"] == [
        {"running": 0, "waiting": 0}
    ]
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    (_, prompt, params), *_ = client.app.state.serving.engine.asked
    assert (list(prompt), params.max_tokens) == ([0], 1)
