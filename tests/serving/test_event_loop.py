"""What one request sends may not hold up those of others: the event loop does nothing long."""

import threading
import time

import pytest

from jaxgen.engine.outputs import TokenLogprob
from jaxgen.serving.deltas import CompletionDelta, RequestDelta
from jaxgen.serving.generation import Answered, Grown, grow
from jaxgen.text.chat_template import ChatTemplate

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PART = {"type": "text", "text": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["hi"] * 5}, "prompt"),
        ("/v1/completions", {"prompt": [[5]] * 3, "n": 2}, "n"),
        ("/v1/chat/completions", {**CHAT, "n": 5}, "n"),
        ("/generate", {"text": ["hi"] * 5}, "text"),
        ("/mii/stub", {"prompts": ["hi"] * 5}, "prompts"),
    ],
)
def test_too_many_continuations_are_refused_before_a_prompt_is_read(
    ask, monkeypatch, path, body, param
):
    """A million short prompts would take the event loop a minute."""
    client = ask(max_choices=4)
    tokenizer = client.app.state.serving.engine.tokenizer
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("a prompt was read"))
    told = client.post(path, json=body)
    assert (told.status_code, told.json()["error"]["param"]) == (400, param)
    assert "at most 4" in told.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "beside"),
    [
        (CHAT, False),
        ({"messages": CHAT["messages"] * 2 * 101}, True),
        ({**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, True),
        *(
            ({"messages": [{"role": "user", "content": [PART] * count}]}, count > 100)
            for count in (1, 101)
        ),
    ],
)
def test_long_conversations_are_written_beside_the_event_loop(ask, monkeypatch, body, beside):
    threads, render = [], ChatTemplate.render

    def watched(*arguments, **options):
        threads.append(threading.current_thread().name)
        return render(*arguments, **options)

    monkeypatch.setattr(ChatTemplate, "render", watched)
    client = ask(trust_request_chat_template=True)
    body = {**body, "tool_choice": "none", "chat_template": "hi"}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    (thread,) = threads
    assert thread.startswith("asyncio_") == beside  # the executor's


def test_a_long_answer_grows_by_what_comes():
    """With log-probabilities too: forty thousand tokens, one by one."""
    entry = [TokenLogprob(5, -1.0, ())]
    delta = RequestDelta(
        "a", [], 0, None, [CompletionDelta(0, "x", [5], entry, None, None, None)], False
    )
    result = Answered(0, None, [Grown()])
    began = time.monotonic()
    for _ in range(40_000):
        grow(result, delta)
    assert time.monotonic() - began < 2
    (grown,) = result.completions
    assert len(grown.text) == len(grown.token_ids) == len(grown.logprobs or ()) == 40_000
    assert len(entry) == 1
