"""The server answers `vllm bench serve`: its bodies, its headers, its way of reading a stream."""

import codecs
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

# What an aiohttp session sends of itself, and what the client adds.
HEADERS = {
    "accept": "*/*",
    "accept-encoding": "gzip, deflate",
    "user-agent": "Python/3.12 aiohttp/3.13.2",
    "authorization": "Bearer key",
}
PROMPT = "hello you"
BODIES = {
    "/v1/completions": {
        "model": "tiny",
        "prompt": PROMPT,
        "repetition_penalty": 1.0,
        "max_tokens": 12,
        "logprobs": None,
    },
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        "max_completion_tokens": 12,
    },
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}


class Reader:
    """Reads as that client does: what a read gives is stripped, and whatever then ends in a whole
    JSON object counts, its empty line or not."""

    def __init__(self):
        self.rest, self.decoder = "", codecs.getincrementaldecoder("utf-8")()

    def messages(self, read):
        whole = []
        self.rest += self.decoder.decode(read.strip())
        while "\n\n" in self.rest:
            message, self.rest = self.rest.split("\n\n", 1)
            whole.append(message.strip())
        told = self.rest.removeprefix("data: ").strip()
        if self.rest.startswith("data: ") and (told == "[DONE]" or is_json(told)):
            whole.append(self.rest.strip())
            self.rest = ""
        return [message for message in whole if message and not message.startswith(":")]


def is_json(text):
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def ask(client, path, number):
    """(text, pieces of output, usage) of one request."""
    headers = HEADERS | {"x-request-id": f"bench-0a1b2c3d-{number}"}
    reader, text, pieces, usage, done = Reader(), "", 0, None, False
    body = BODIES[path] | STREAMED | {"temperature": 0.0}
    with client.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == headers["x-request-id"]
        for read in answer.iter_raw():
            for message in reader.messages(read):
                told = message.removeprefix("data: ")
                if told == "[DONE]":
                    done = True
                    continue
                event = json.loads(told)
                if choices := event.get("choices"):
                    choice = choices[0]
                    chat = "chat" in path
                    text += (choice["delta"].get("content") if chat else choice["text"]) or ""
                    pieces += 1
                elif event.get("usage"):
                    usage = event["usage"]
    assert done
    assert not reader.rest
    return text, pieces, usage


@pytest.mark.parametrize("path", BODIES)
def test_streams_are_read_whole(server, path):
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda number: ask(client, path, number), range(6)))
        body = BODIES[path] | {"ignore_eos": True, "temperature": 0.0}
        whole = client.post(path, json=body, headers=HEADERS).json()
    choice = whole["choices"][0]
    text = choice["text"] if path == "/v1/completions" else choice["message"]["content"]
    for told, pieces, usage in answers:
        assert told == text
        assert pieces >= 1  # tokens that wait share one
        assert usage["completion_tokens"] == 12
        assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_what_it_asks_before_and_after(server):
    with httpx.Client(base_url=server.base_url, headers=HEADERS, timeout=60) as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["root"]) == ("tiny", "tiny")
        asked = {"model": "tiny", "prompt": PROMPT, "add_special_tokens": False}
        tokens = client.post("/tokenize", json=asked).json()["tokens"]
        text = client.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()
        assert text["prompt"] == PROMPT
        assert client.get("/metrics").status_code == 200


def test_a_refusal_has_a_status_and_a_reason(server):
    """The client tells its user the status line's reason, and nothing else."""
    body = BODIES["/v1/completions"] | STREAMED | {"max_tokens": 10**6}
    url = server.base_url + "/v1/completions"
    answer = httpx.post(url, json=body, headers=HEADERS)
    assert (answer.status_code, answer.reason_phrase) == (400, "Bad Request")
