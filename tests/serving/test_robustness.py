"""Thousands of mixed requests, many of them hostile, at once: all are answered, nothing leaks."""

import asyncio
import contextlib
import json
import random
import resource
from collections import Counter

import httpx
import pytest

from tests.serving.live import wait_until

REQUESTS, CONCURRENT = 2000, 200
HEADERS = {"content-type": "application/json"}
DEEP = b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}"


def body_of(chance: random.Random, **changes) -> bytes:
    body = {"prompt": "hello " * chance.randint(1, 12), "max_tokens": chance.randint(1, 12)}
    body |= {"temperature": chance.choice([0, 1]), "ignore_eos": chance.random() < 0.5}
    return json.dumps(body | changes).encode()


async def fine(client, chance):
    """A request that must be answered, or refused for want of room."""
    path, changes = chance.choice(
        [
            ("/v1/completions", {}),
            ("/v1/completions", {"stream": True}),
            ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "echo": True}),
            ("/v1/completions", {"temperature": 1.0, "n": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/responses", {"input": "hi", "prompt": None, "max_output_tokens": 9}),
        ]
    )
    answer = await client.post(path, content=body_of(chance, **changes), headers=HEADERS)
    assert answer.status_code in (200, 503), answer.text
    if answer.status_code == 200 and changes.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text
    return f"fine {answer.status_code}"


async def malformed(client, chance):
    """A body that can only be refused."""
    bad = [
        *(b"", b"{", b"[]", b"nonsense", b"\xff\xff", b"null", DEEP, b"[" * 50_000),
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "stop": ["\\udc00"]}',
        *(body_of(chance, prompt=p) for p in ([], None, 5, [[]], [1, 10**9], "a " * 5000)),
        *(body_of(chance, temperature=t) for t in (-1, 9, "hot", [])),
        *(body_of(chance, **c) for c in ({"n": 0}, {"max_tokens": 10**6}, {"logprobs": 99})),
    ]
    path = chance.choice(["/v1/completions", "/v1/completions", "/v1/chat/completions"])
    answer = await client.post(path, content=chance.choice(bad), headers=HEADERS)
    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["error"]["code"] == answer.status_code
    return "malformed"


async def hangs_up(client, chance):
    """A reader that leaves, before the first token or in the middle."""
    body = body_of(chance, max_tokens=60, stream=chance.random() < 0.7, ignore_eos=True)
    try:
        async with asyncio.timeout(chance.random() / 2):
            async with client.stream(
                "POST", "/v1/completions", content=body, headers=HEADERS
            ) as answer:
                async for _ in answer.aiter_raw():
                    if chance.random() < 0.2:
                        return "left"
    except TimeoutError:
        return "timed out"
    return "read to the end"


async def reads_slowly(client, chance):
    """A reader that takes its time."""
    body = body_of(chance, stream=True, max_tokens=30)
    async with client.stream("POST", "/v1/completions", content=body, headers=HEADERS) as answer:
        async for _ in answer.aiter_raw():
            await asyncio.sleep(0.05)
    return f"slow {answer.status_code}"


async def breaks_off(client, chance):
    """A connection that ends in the middle of its body, or speaks another language."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(chance.choice([head + b"content-length: 500\r\n\r\n{", head, b"\x16\x03\x01\x00"]))
    await writer.drain()
    await asyncio.sleep(chance.random() / 5)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    del reader
    return "broke off"


KINDS = [fine] * 8 + [malformed] * 4 + [hangs_up] * 5 + [reads_slowly, breaks_off]


async def storm(base_url: str, seed: int) -> Counter[str]:
    """What became of all requests; raises what must not happen."""
    places, limits = asyncio.Semaphore(CONCURRENT), httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=300) as client:

        async def one(number: int) -> str:
            chance = random.Random(seed * REQUESTS + number)
            async with places:
                return await chance.choice(KINDS)(client, chance)

        return Counter(await asyncio.gather(*(one(number) for number in range(REQUESTS))))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_storm_leaves_nothing_behind(crowded):
    # A client that times out while it connects leaves its socket to the garbage collector.
    engine, sizes = crowded.serving.engine, []
    for seed in range(3):
        told = asyncio.run(storm(crowded.base_url, seed))
        assert sum(told.values()) == REQUESTS
        assert told["fine 200"] > REQUESTS / 4
        wait_until(lambda: crowded.serving.active == 0 and engine.stats().running == 0, 60)
        stats = engine.stats()
        assert (stats.waiting, stats.kv_used_blocks) == (0, 0)
        assert httpx.get(crowded.base_url + "/health").status_code == 200
        sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert sizes[2] - sizes[1] < 64 * 1024  # kB: the peak has been reached before
