"""OpenAI's own client against a tiny real model: what it gets is what the engine generates."""

import asyncio
import contextlib
import json
import threading

import httpx
import numpy as np
import openai
import pytest

from tests.serving.live import post, wait_until

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.base_url + "/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def truth(golden_dir):
    """Prompt and greedy continuation of the recording's second prompt."""
    expected = np.load(golden_dir("llama_plain") / "expected.npz")
    return expected["prompt_1"].tolist(), expected["greedy_1"].tolist()


def greedy(client, prompt, **options):
    """A greedy completion that ends at its length."""
    extra = {"ignore_eos": True, "return_token_ids": True}
    options = {"max_tokens": 8, "extra_body": extra} | options
    return client.completions.create(model="llama", prompt=prompt, temperature=0, **options)


def test_models(client, served):
    assert [model.id for model in client.models.list()] == ["llama", "alias"]
    assert client.models.retrieve("alias").max_model_len == 96
    assert httpx.get(served.base_url + "/get_model_info").json()["served_model_name"] == "llama"


def test_greedy_tokens_are_the_recorded_ones(client, truth):
    prompt, expected = truth
    answer = greedy(client, prompt)
    assert answer.choices[0].token_ids == expected[:8]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 8
    several = greedy(client, [prompt, prompt[:3], prompt])
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.choices[0].text == several.choices[2].text == answer.choices[0].text
    assert several.choices[1].text == greedy(client, prompt[:3]).choices[0].text


def test_a_stream_says_the_same(client, truth):
    prompt, _ = truth
    whole = greedy(client, prompt, max_tokens=20).choices[0]
    chunks = list(greedy(client, prompt, max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    ids = [token for chunk in chunks for token in chunk.choices[0].token_ids]
    assert ids == whole.token_ids
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat(client, tokenizer):
    asked = {"model": "llama", "messages": HI, "max_completion_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert whole.usage.prompt_tokens == len(tokenizer.encode_chat(HI))
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    assert choice.logprobs.content[0].logprob == choice.logprobs.content[0].top_logprobs[0].logprob
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == choice.message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_conversation_begins_with_one_bos(served, tokenizer):
    body = {"model": "llama", "messages": HI}
    ids = post(served, "/tokenize", body).json()["tokens"]
    assert ids == tokenizer.encode_chat(HI)
    assert ids.count(tokenizer.bos_id) == 1
    told = post(served, "/detokenize", {"tokens": [ids, ids[1:]]}).json()
    assert told["prompt"] == told["text"] == [tokenizer.decode(ids), tokenizer.decode(ids[1:])]


def test_seeds(client):
    asked = {"model": "llama", "prompt": "hello", "max_tokens": 8, "temperature": 1.0}
    one = client.completions.create(**asked, seed=7, n=3)
    again = client.completions.create(**asked, seed=7, n=3)
    texts = [choice.text for choice in one.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) > 1


def test_echoed_logprobs_are_exact(client, served):
    """lm-eval's way: the likelihood of a continuation is read off the echoed prompt."""
    asked = {"model": "llama", "prompt": "hello there", "temperature": 0, "logprobs": 1}
    told = client.completions.create(**asked, echo=True, max_tokens=0)
    (choice,), logprobs = told.choices, told.choices[0].logprobs
    assert choice.text == "hello there"
    assert told.usage.completion_tokens == 0
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    count = told.usage.prompt_tokens
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == count
    assert all(choice.text[o:].startswith(t) for o, t in pairs(logprobs) if t.strip() and o)
    grown = client.completions.create(**asked, echo=True, max_tokens=4)
    chosen = grown.choices[0].logprobs
    assert chosen.token_logprobs[1:count] == pytest.approx(logprobs.token_logprobs[1:], abs=1e-4)
    for value, top in zip(chosen.token_logprobs[count:], chosen.top_logprobs[count:], strict=True):
        assert value == max(top.values())  # by equality: greedy tokens are the likeliest


def pairs(logprobs):
    return zip(logprobs.text_offset, logprobs.tokens, strict=True)


def test_responses(client):
    asked = {"model": "llama", "input": "hi", "max_output_tokens": 6, "temperature": 0}
    whole = client.responses.create(**asked, instructions="Be brief.")
    assert whole.status in ("completed", "incomplete")
    assert whole.usage.output_tokens <= 6
    assert whole.output_text == whole.output[0].content[0].text
    events = list(client.responses.create(**asked, instructions="Be brief.", stream=True))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    final = events[-1].response
    assert final.status == whole.status
    assert "".join(texts) == final.output_text == whole.output_text


def test_refusals_are_the_clients_exceptions(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="llama", prompt="a", max_tokens=1000)
    assert refused.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="llama", prompt="a", logit_bias={"9999": 1})
    stop = {"stop_token_ids": [600]}
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="llama", prompt="a", stream=True, extra_body=stop)


def test_native_routes(served, truth):
    prompt, expected = truth
    body = {"input_ids": prompt, "return_logprob": True, "rid": "mine"}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    told = post(served, "/generate", body).json()
    assert told["output_ids"] == expected[:4]
    assert told["meta_info"]["id"] == "mine"
    assert [token for _, token, _ in told["meta_info"]["output_token_logprobs"]] == expected[:4]
    assert post(served, "/abort_request", {"rid": "nobody"}).json() == {"success": True}
    assert post(served, "/flush_cache", None).json() == {"success": True}


def test_aborted_by_its_rid(served):
    told = []
    body = {"text": "a", "rid": "doomed", "sampling_params": {"ignore_eos": True}}
    body["sampling_params"]["max_new_tokens"] = 90

    def ask():
        told.append(post(served, "/generate", body))

    async def hold():
        await served.serving.engine.pause()

    run_in(served, hold())
    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: served.serving.active)
    post(served, "/abort_request", {"rid": "doomed"})
    run_in(served, served.serving.engine.resume())
    asking.join(30)
    assert told[0].status_code == 503
    assert "aborted" in told[0].json()["error"]["message"]


def run_in(served, coroutine):
    """Runs it in the server's event loop."""
    loop = served.serving.engine._asyncio
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)


def test_nothing_is_held_after_many_have_hung_up(served):
    engine = served.serving.engine
    url = served.base_url + "/v1/completions"
    body = {"prompt": "hello", "max_tokens": 80, "stream": True, "ignore_eos": True}
    for _ in range(12):
        with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", url, json=body) as answer:
            next(answer.iter_raw())
    wait_until(lambda: served.serving.active == 0 and engine.stats().running == 0)
    assert json.loads(httpx.get(served.base_url + "/status.json").text)["running"] == 0
    assert engine.stats().kv_used_blocks == 0
