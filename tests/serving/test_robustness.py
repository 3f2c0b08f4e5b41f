"""Thousands of mixed requests, many of them hostile, at once: all are answered, nothing leaks."""

import asyncio
import contextlib
import gc
import json
import random
import resource
import socket
from collections import Counter

import httpx
import pytest

from tests.serving.live import Live, wait_until

REQUESTS, CONCURRENT = 2000, 200
HEADERS = {"content-type": "application/json"}
HI = [{"role": "user", "content": "hi"}]
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
            ("/v1/chat/completions", {"messages": HI}),
            ("/v1/chat/completions", {"messages": HI, "stream": True, "logprobs": True}),
            ("/v1/completions", {"structured_outputs": {"regex": "[a-c]{2,4}"}}),
            ("/v1/responses", {"input": "hi", "prompt": None, "max_output_tokens": 9}),
            ("/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}),
            ("/tokenize", {}),
        ]
    )
    answer = await client.post(path, content=body_of(chance, **changes), headers=HEADERS)
    assert answer.status_code in (200, 503), answer.text
    if answer.status_code == 503:
        assert int(answer.headers["retry-after"]) >= 1
        return "fine 503"
    check_whole(answer.text, stream=changes.get("stream", False))
    return "fine 200"


def check_whole(text, *, stream):
    """An answer that has its end: every choice says why it ended."""
    if not stream:
        ended = json.loads(text)
        choices = ended.get("choices") if isinstance(ended, dict) else None
        assert all(choice["finish_reason"] for choice in choices or ())
        return
    assert text.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert not any("error" in chunk for chunk in chunks)
    assert sum(bool(c["finish_reason"]) for chunk in chunks for c in chunk["choices"]) == 1


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
    """A reader that takes its time, and whose system holds little: the server's buffers fill."""
    body = body_of(chance, stream=True, max_tokens=40, logprobs=20, ignore_eos=True)
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    narrow.setblocking(False)
    place = (client.base_url.host, client.base_url.port)
    await asyncio.get_running_loop().sock_connect(narrow, place)
    reader, writer = await asyncio.open_connection(sock=narrow, limit=2048)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    received = b""
    while data := await reader.read(1024):
        received += data
        await asyncio.sleep(0.005)
    writer.close()
    if b" 503 " in received[:20]:
        return "slow 503"
    assert b" 200 " in received[:20], received
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), received[-200:]
    assert received.count(b'"finish_reason": "length"') == 1
    return "slow 200"


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


def leftovers(server: Live) -> list[str]:
    """What of the requests is still there, now that all have ended: must be nothing."""
    serving, engine = server.serving, server.serving.engine

    def look() -> list[str]:
        loop = engine._thread.loop
        state, ledger = loop.engine.state, loop._ledger
        state.check()  # each block is free, or owned as often as counted
        found = {
            "blocks": state.free_blocks != state.num_blocks,
            "sequences": len(state) or state.free_slots != state.num_slots,
            "requests": loop.has_unfinished or ledger.continuations or ledger.scored,
            "scheduled": ledger.scheduler.unfinished or ledger.masks.waiting,
            "followed": engine._thread._followed,
        }
        return [name for name, left in found.items() if left]

    there = asyncio.run_coroutine_threadsafe(engine.call(look), engine._asyncio).result(30)
    held = {"streams": engine._streams, "answers": engine._answers, "ids": serving._engine_ids}
    return [*there, *(name for name, left in held.items() if left)]


def containers() -> int:
    """How many objects of Python's are alive that can hold others."""
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_storm_leaves_nothing_behind(crowded):
    # A client that times out while it connects leaves its socket to the garbage collector.
    engine, sizes, objects = crowded.serving.engine, [], []
    for seed in range(3):
        told = asyncio.run(storm(crowded.base_url, seed))
        assert sum(told.values()) == REQUESTS
        assert told["fine 200"] > REQUESTS / 4
        assert told["slow 200"] > REQUESTS / 80
        wait_until(lambda: crowded.serving.active == 0 and engine.stats().running == 0, 60)
        stats = engine.stats()
        assert (stats.waiting, stats.kv_used_blocks) == (0, 0)
        assert leftovers(crowded) == []
        assert httpx.get(crowded.base_url + "/health").status_code == 200
        sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        objects.append(containers())
    assert stats.preemptions > 0
    assert sizes[2] - sizes[1] < 32 * 1024  # kB: the peak has been reached before
    assert objects[2] - objects[1] < REQUESTS / 4, objects  # not one object a request


def test_in_the_middle_of_a_storm_the_engine_dies(crowded):
    """Who was being answered is told so, who comes later is refused, and nobody waits for ever."""

    async def begun(client, number):
        body = body_of(random.Random(number), stream=number % 2, max_tokens=60, ignore_eos=True)
        answer = await client.post("/v1/completions", content=body, headers=HEADERS)
        if answer.status_code == 200:
            text = answer.text
            assert text.endswith("data: [DONE]\n\n")
            return "told in the stream" if '"error"' in text else "answered"
        assert answer.json()["error"]["message"]
        return str(answer.status_code)

    async def storm_and_death():
        async with httpx.AsyncClient(base_url=crowded.base_url, timeout=60) as client:
            jobs = [asyncio.create_task(begun(client, number)) for number in range(60)]
            engine, before = crowded.serving.engine, crowded.serving.engine.stats().steps
            while engine.stats().steps < before + 20:
                await asyncio.sleep(0.01)
            engine._thread.order(lambda: 1 / 0)
            told = Counter(await asyncio.wait_for(asyncio.gather(*jobs), 60))
            later = Counter([await begun(client, number) for number in range(3)])
            health = (await client.get("/health")).status_code
            return told, later, health

    told, later, health = asyncio.run(storm_and_death())
    assert (later, health) == ({"503": 3}, 503)
    assert told["told in the stream"] > 0
    assert told["500"] > 0
    assert crowded.serving.active == 0
