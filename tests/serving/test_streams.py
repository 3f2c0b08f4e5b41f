"""What streams look like on the wire: chunks, usage, tools, reasoning, and errors on the way."""

import json

import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'


def events(response):
    """The JSON of all data events but the last, which is [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.removesuffix("\n\n").split("\n\n")
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def pieces(text, size):
    return [text[place : place + size] for place in range(0, len(text), size)]


def test_a_completion_stream(ask):
    client = ask(["one", "", " two", "é"])
    told = events(client.post("/v1/completions", json={"prompt": "hi", "stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in told] == ["one", " two", "é"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in told] == [None, None, "stop"]
    assert len({chunk["id"] for chunk in told}) == 1
    assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in told)


def test_tokens_are_told_where_there_is_no_text(ask):
    """Without a tokenizer; a load generator counts them."""
    client = ask(["", "", ""])
    client.app.state.serving.engine.tokenizer = None
    body = {"prompt": [5, 6], "stream": True}
    told = events(client.post("/v1/completions", json=body))
    assert [chunk["choices"][0]["text"] for chunk in told] == ["", "", ""]
    assert told[-1]["choices"][0]["finish_reason"] == "stop"


def test_usage_comes_last_or_with_every_chunk(ask):
    client = ask()
    for continuous in (False, True):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        body = {"prompt": ["hi", "ho"], "stream": True, "stream_options": options}
        told = events(client.post("/v1/completions", json=body))
        assert told[-1]["choices"] == []
        usage = told[-1]["usage"]
        assert usage["completion_tokens"] == 6
        assert usage["total_tokens"] == usage["prompt_tokens"] + 6
        assert all((chunk["usage"] is not None) == continuous for chunk in told[:-1])
        assert {chunk["choices"][0]["index"] for chunk in told[:-1]} == {0, 1}


def test_a_chat_stream(ask):
    body = {**CHAT, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    told = events(ask().post("/v1/chat/completions", json=body))
    first = [chunk for chunk in told if chunk["choices"] and chunk["choices"][0]["index"] == 1]
    deltas = [chunk["choices"][0]["delta"] for chunk in first]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "one two three"
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in first[-2:]] == [None, "stop"]
    assert told[-1]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("size", [1, 7, 200])
def test_reasoning_and_calls(ask, size):
    text = "<think>What time?</think>\nLet me look." + CALL + CALL
    client = ask(
        pieces(text, size),
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
    )
    body = {**CHAT, "tools": [TOOL]}
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    told = events(client.post("/v1/chat/completions", json={**body, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in told]
    calls: dict[int, dict] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            grown = calls.setdefault(call["index"], {"arguments": ""})
            grown |= {key: call[key] for key in ("id", "type") if key in call}
            grown |= {k: v for k, v in call["function"].items() if k == "name"}
            grown["arguments"] += call["function"]["arguments"]
    assert message["reasoning_content"] == message["reasoning"] == "What time?"
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "What time?"
    assert message["content"] == "Let me look."
    assert "".join(d.get("content") or "" for d in deltas).strip() == "Let me look."
    for call in calls.values():
        assert call["name"] == "now"
        assert json.loads(call["arguments"]) == {"zone": "UTC"}
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["now", "now"]
    assert len(calls) == 2
    assert len({call["id"] for call in calls.values()}) == 2
    assert told[-1]["choices"][0]["finish_reason"] == "tool_calls"
    one = client.post("/v1/chat/completions", json={**body, "parallel_tool_calls": False}).json()
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1
    quiet = client.post("/v1/chat/completions", json={**body, "include_reasoning": False}).json()
    assert quiet["choices"][0]["message"]["reasoning"] is None


def test_logprobs_are_json_in_streams_too(ask):
    client = ask()
    asked = {"stream": True, "max_tokens": 3}
    told = events(client.post("/v1/completions", json={"prompt": "a", "logprobs": 2, **asked}))
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in told] == [[0], [1], [2]]
    assert min(told[0]["choices"][0]["logprobs"]["top_logprobs"][0].values()) == -9999.0
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, **asked}
    told = events(client.post("/v1/chat/completions", json=body))
    listed = [chunk["choices"][0]["logprobs"] for chunk in told]
    (entry,) = listed[1]["content"]
    assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
    assert len(entry["top_logprobs"]) == 2
    assert listed[0] is listed[-1] is None


@pytest.mark.parametrize(
    ("path", "asked", "impossible"),
    [
        ("/v1/completions", {"prompt": [5, 6], "logprobs": 2}, 3),
        ("/v1/completions", {"prompt": [5, 6], "logprobs": 2, "echo": True}, 4),
        ("/v1/completions", {"prompt": [5, 6], "prompt_logprobs": 2}, 1),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}, 3),
        ("/generate", {"input_ids": [5, 6], "return_logprob": True, "top_logprobs_num": 2}, 4),
    ],
)
def test_what_is_impossible_has_a_logprob_that_json_knows(ask, path, asked, impossible):
    answer = ask().post(path, json={"logprob_start_len": 0, **asked})
    assert answer.status_code == 200
    assert answer.text.count("-9999.0") == impossible


def test_logprobs_without_top_logprobs(ask):
    body = {**CHAT, "logprobs": True}
    choice = ask().post("/v1/chat/completions", json=body).json()["choices"][0]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], [], []]


def test_a_stream_that_is_aborted_says_so(ask):
    client = ask(["a"] * 100, seconds=0.01)
    engine = client.app.state.serving.engine
    engine.aborted.append("cmpl-mine#")  # whatever its number is
    engine.aborted = _Prefixes(engine.aborted)
    headers = {"x-request-id": "mine"}
    body = {"prompt": "a", "stream": True, "max_tokens": 200}
    response = client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 503  # it ended before anything was sent
    engine.aborted = _Prefixes(["cmpl-mine#"], after=3)
    told = events(client.post("/v1/completions", json=body, headers=headers))
    assert told[-1]["error"]["code"] == 503
    assert all("error" not in chunk for chunk in told[:-1])


class _Prefixes(list):
    """`in` finds ids that begin with an entry, from the `after`-th question on."""

    def __init__(self, entries, after=0):
        super().__init__(entries)
        self._after = after

    def __contains__(self, name):
        self._after -= 1
        return self._after < 0 and any(name.startswith(entry) for entry in self)


def test_responses_stream_typed_events(ask):
    client = ask(
        pieces("<think>so</think>Look" + CALL, 5),
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
    tool = {"type": "function", **TOOL["function"]}
    asked = {"input": "hi", "tools": [tool], "stream": True}
    response = client.post("/v1/responses", json=asked)
    told = [
        json.loads(part.partition("data: ")[2])
        for part in response.text.removesuffix("\n\n").split("\n\n")
    ]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [told[0]["type"], told[-1]["type"]] == ["response.created", "response.completed"]
    output = told[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert json.loads(output[2]["arguments"]) == {"zone": "UTC"}
    parts = ("reasoning_text", "output_text", "function_call_arguments")
    wholes = [*(item["content"][0]["text"] for item in output[:2]), output[2]["arguments"]]
    for part, whole in zip(parts, wholes, strict=True):
        grown = [e["delta"] for e in told if e["type"] == f"response.{part}.delta"]
        (done,) = [e for e in told if e["type"] == f"response.{part}.done"]
        assert "".join(grown) == whole == done.get("text", done.get("arguments"))
    assert wholes[:2] == ["so", "Look"]
    opened = [e["item"]["id"] for e in told if e["type"] == "response.output_item.added"]
    closed = [e["item"]["id"] for e in told if e["type"] == "response.output_item.done"]
    assert opened == closed == [item["id"] for item in output]


def test_native_streams_are_cumulative(ask):
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 2}, "stream": True}
    told = events(ask().post("/generate", json=body))
    assert [chunk["text"] for chunk in told] == ["one", "one two"]
    assert told[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert told[0]["meta_info"]["finish_reason"] is None
