"""The load generator's client, against servers that end connections when and as they like."""

import asyncio

import pytest

from jaxgen.bench.http_client import HTTPClient
from jaxgen.bench.load import Target, run_load, wait_until_ready
from jaxgen.bench.openai_stream import Backend
from jaxgen.bench.workload import BenchRequest
from jaxgen_checkpoints.errors import RefusedInput

STREAM = (
    b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": "b"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}\n\n'
    b"data: [DONE]\n\n"
)
WHOLE = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
GOOD = WHOLE % (len(STREAM), STREAM)
BUSY = b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy"
REQUEST = BenchRequest([1], 2)


def with_server(answers, ask, *, hang_up=False):
    """What ask(target) gives, while a server gives these answers, one a request."""
    left, heads = list(answers), []

    async def serve(reader, writer):
        try:
            while left:
                head = await reader.readuntil(b"\r\n\r\n")
                size = next(line for line in head.split(b"\r\n") if b"Content-Length" in line)
                await reader.readexactly(int(size.split(b":")[1]))
                heads.append(head.decode())
                writer.write(left.pop(0))
                await writer.drain()
                if hang_up:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with (
            server,
            HTTPClient(f"http://127.0.0.1:{port}/base", headers={"A": "b"}) as client,
        ):
            return await ask(Target(client, Backend.COMPLETIONS, "/v1/completions", "m"))

    return asyncio.run(run()), heads


async def two(target):
    first = await run_load(target, [REQUEST], [0.0])
    await asyncio.sleep(0.02)
    second = await run_load(target, [REQUEST], [0.0])
    return first.outcomes + second.outcomes


@pytest.mark.parametrize("hang_up", [False, True])
def test_a_connection_is_used_again_or_replaced(hang_up):
    outcomes, heads = with_server([GOOD, GOOD], two, hang_up=hang_up)
    assert [(each.error, each.text, each.output_tokens) for each in outcomes] == [("", "ab", 2)] * 2
    assert heads[0].startswith("POST /base/v1/completions HTTP/1.1\r\n")
    assert "A: b\r\n" in heads[0]
    assert "X-Request-Id: bench-0\r\n" in heads[0]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (BUSY, "status 503: busy"),
        (b"nonsense\r\n\r\n", "not HTTP/1.1"),
        (GOOD[:-30], "hung up within its answer"),
        (b"", "hung up before it answered"),
        (WHOLE % (13, b"data: {no}\n\n\n"), "JSONDecodeError"),
        (WHOLE % (14, b"data: [DONE]\n\n"), "no usage"),
    ],
)
def test_what_goes_wrong_is_told(answer, error):
    outcomes, _ = with_server([answer], lambda target: run_one(target), hang_up=True)
    assert error in outcomes[0].error


async def run_one(target):
    return (await run_load(target, [REQUEST], [0.0])).outcomes


def test_a_server_is_waited_for(monkeypatch):
    monkeypatch.setattr("jaxgen.bench.load._RETRY_SECONDS", 0.01)

    async def ask(target):
        await wait_until_ready(target, REQUEST, 5)
        return await run_one(target)

    (outcome,), heads = with_server([BUSY, BUSY, GOOD, GOOD], ask)
    assert outcome.error == ""
    assert len(heads) == 4
    with pytest.raises(RefusedInput, match="status 503: busy"):
        with_server([BUSY] * 2, lambda target: wait_until_ready(target, REQUEST, 0.001))


def test_headers_have_one_line():
    async def ask():
        async with HTTPClient("http://127.0.0.1:1", headers={"a": "b\r\nc: d"}) as client:
            await client.send("GET", "/")

    with pytest.raises(RefusedInput, match="line break"):
        asyncio.run(ask())
