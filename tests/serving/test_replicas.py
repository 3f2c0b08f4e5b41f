"""Several replicas behind one port: who gets what, what becomes of it when one of them dies."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Generator

import httpx
import pytest

from jaxgen.serving.app import create_app
from jaxgen.serving.replicas.adoption import device_environments
from jaxgen.serving.replicas.batches import batch_of
from jaxgen.serving.replicas.fleet import Fleet
from jaxgen.serving.replicas.front import create_front
from jaxgen.serving.replicas.merging import merge_metrics
from jaxgen.serving.replicas.replica import Replica, State
from jaxgen.serving.settings import ServerSettings
from jaxgen_checkpoints.errors import ConfigError
from tests.serving.live import Live, live, post, wait_until
from tests.serving.stub_engine import StubEngine

KEY = {"authorization": "Bearer key"}


class Nearby(Replica):
    """A replica that is a server of this process, and dies when it is told to."""

    def __init__(self, name: str, server: Live) -> None:
        super().__init__(name, {"model": "none"}, {})
        self.port = server.port

    async def start(self) -> None:
        """It runs already."""

    async def watch(self, client) -> None:
        while True:
            await self._look(client)
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        self._reserved.close()


class Pair:
    """Two servers around engines that pretend, and the front."""

    def __init__(self, tokenizer, stack: contextlib.ExitStack) -> None:
        texts = [" word"] * 20
        self.engines = [StubEngine(tokenizer, texts, seconds=0.02) for _ in range(2)]
        settings = ServerSettings(served_model_names=("tiny",), api_keys=("key",))
        self.servers = [stack.enter_context(live(create_app(e, settings))) for e in self.engines]
        fleet = Fleet({"model": "none"}, [])
        fleet.replicas = [Nearby(str(i), server) for i, server in enumerate(self.servers)]
        self.fleet = fleet
        front = ServerSettings(api_keys=("key",), root_path="/llm")
        self.front = stack.enter_context(live(create_front(fleet, front)))
        self.url = self.front.base_url

    def ask(self, path="/v1/completions", **body):
        sent = {"prompt": "hello", "max_tokens": 4} | body
        return post(self.front, path, sent, headers=KEY)

    @property
    def asked(self):
        return [len(engine.asked) for engine in self.engines]


@pytest.fixture
def pair(tokenizer) -> Generator[Pair]:
    with contextlib.ExitStack() as stack:
        yield Pair(tokenizer, stack)


def at_once(*calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_requests_go_to_whoever_has_fewest_prompts(pair):
    at_once(*[pair.ask] * 6)
    assert pair.asked == [3, 3]
    body = {"prompt": ["a"] * 4, "max_tokens": 20, "stream": True}  # streams are not split
    for engine in pair.engines:
        engine.seconds = 0.5
    url = pair.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, headers=KEY) as answer:
        pieces = answer.iter_raw()  # held: a generator that is dropped hangs up
        next(pieces)
        busy = pair.asked.index(max(pair.asked))
        pair.engines[busy].seconds = 1000  # until the stream is left
        assert [replica.outstanding for replica in pair.fleet.replicas].count(4) == 1
        at_once(*[lambda: pair.ask(max_tokens=1)] * 3)
        assert pair.asked[busy] == 7  # four prompts outweigh three requests
    wait_until(lambda: pair.front.serving.active == 0)
    health = httpx.get(pair.url + "/health").json()
    assert health["status"] == "ok"
    assert sum(each["served"] for each in health["replicas"]) == 10


def test_each_prompt_of_a_batch_goes_its_own_way(pair):
    prompts = ["a", "a b", "a b c", "d", "e"]
    told = pair.ask(prompt=prompts, n=2, echo=True, temperature=1).json()
    assert pair.asked == [3, 2]
    assert [choice["index"] for choice in told["choices"]] == list(range(10))
    texts = [choice["text"].removesuffix(" word" * 4) for choice in told["choices"]]
    assert texts == [prompt for prompt in prompts for _ in range(2)]
    assert told["usage"]["completion_tokens"] == 40
    alone = [pair.ask(prompt=prompt).json()["usage"]["prompt_tokens"] for prompt in prompts]
    assert told["usage"]["prompt_tokens"] == sum(alone)
    sampling = {"max_new_tokens": 2}
    native = pair.ask("/generate", prompt=None, text=prompts, sampling_params=sampling).json()
    assert [one["meta_info"]["prompt_tokens"] for one in native] == alone
    mii = pair.ask("/mii/tiny", prompt=None, max_tokens=None, prompts=prompts, max_new_tokens=2)
    assert mii.status_code == 400  # MII knows no max_tokens
    body = {"prompts": prompts, "max_new_tokens": 2}
    mii = post(pair.front, "/mii/tiny", body, headers=KEY).json()
    assert [one["prompt_length"] for one in mii] == alone
    refused = pair.ask(prompt=["a", "b"], max_tokens=1000)
    assert refused.json()["error"]["param"] == "max_tokens"
    wait_until(lambda: pair.front.serving.active == 0)


def test_a_stream_comes_as_it_is(pair):
    body = {"prompt": "hello", "max_tokens": 20, "stream": True}
    headers = KEY | {"x-request-id": "mine"}
    url = pair.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers.get_list("x-request-id") == ["mine"]
        pieces = list(answer.iter_raw())
    assert len(pieces) > 5
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    assert [name.partition("#")[0] for e in pair.engines for name, _, _ in e.asked] == ["cmpl-mine"]


def test_refusals_are_the_replicas_own(pair):
    assert pair.ask(max_tokens=1000).json()["error"]["param"] == "max_tokens"
    assert pair.ask(model="other").status_code == 404
    assert post(pair.front, "/v1/completions", {}).status_code == 401
    assert httpx.get(pair.url + "/nowhere", headers=KEY).status_code == 404
    assert httpx.get(pair.url + "/v1/models/tiny?x=1", headers=KEY).json()["id"] == "tiny"
    assert httpx.get(pair.url + "/v1/completions", headers=KEY).status_code == 405
    assert post(pair.front, "/flush_cache", None, headers=KEY).json() == {"success": True}
    assert sum(pair.asked) == 0


def test_a_client_that_leaves_is_noticed_by_the_replica(pair):
    url, body = pair.url + "/v1/completions", {"prompt": "hello", "max_tokens": 20}
    for stream in (True, False):
        with contextlib.suppress(httpx.TimeoutException):
            asked = {"json": body | {"stream": stream}, "headers": KEY, "timeout": 0.15}
            with httpx.stream("POST", url, **asked) as answer:
                next(answer.iter_raw())
        wait_until(lambda: not any(engine.running for engine in pair.engines), 10)
        wait_until(lambda: pair.front.serving.active == 0)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models/\xff HTTP/1.1\r\n",
        b"GET /v1/models/tiny?q=\x01{}\xff HTTP/1.1\r\n",
        b"GET /v1/models/%00 HTTP/1.1\r\n",
        b"GET /v1/models/" + b"a" * 60_000 + b" HTTP/1.1\r\n",
        b"GET //v1/models HTTP/1.1\r\n",
        b"GET http://elsewhere/v1/models HTTP/1.1\r\n",
        b"GET /v1/models/tiny HTTP/1.1\r\ncontent-type: \x01\xff\r\n",
        b"GET /v1/models/tiny HTTP/1.1\r\nx: \x01\r\nte: trailers\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\n\r\n{",
        b"HEAD /v1/models HTTP/1.1\r\n",
    ],
)
def test_hostile_requests_harm_no_replica(pair, head):
    end = b"" if head.endswith(b"{") else b"host: x\r\nauthorization: Bearer key\r\n\r\n"
    with socket.create_connection(("127.0.0.1", pair.front.port), timeout=10) as connection:
        connection.sendall(head + end)
        answer = connection.recv(65536)
    assert not answer.startswith(b"HTTP/1.1 5")
    assert pair.front.serving.active == 0
    assert [replica.state for replica in pair.fleet.replicas] == [State.READY] * 2
    assert [replica.failed for replica in pair.fleet.replicas] == [0, 0]


def test_a_dead_replica_is_taken_out(pair):
    pair.engines[0].healthy, pair.engines[0].error = False, "out of memory"
    wait_until(lambda: len(pair.fleet.ready) == 1)
    health = httpx.get(pair.url + "/health").json()
    assert health["status"] == "degraded"
    assert "out of memory" in health["replicas"][0]["state"]
    assert [pair.ask().status_code for _ in range(3)] == [200] * 3
    assert pair.asked == [0, 3]
    told = httpx.get(pair.url + "/metrics").text
    assert 'jaxgen:replica_up{engine="0"} 0.0' in told
    assert 'jaxgen:replica_up{engine="1"} 1.0' in told
    assert 'jaxgen:num_requests_running{engine="1",model_name="tiny"}' in told
    assert httpx.get(pair.url + "/status.json").json()["kv_total_blocks"] == 4
    pair.engines[1].healthy = False
    wait_until(lambda: not pair.fleet.ready)
    for path in ("/health", "/ready", "/status.json"):
        assert "no replica is ready" in httpx.get(pair.url + path).json()["error"]["message"]
    assert pair.ask().status_code == 503
    pair.engines[0].healthy = pair.engines[1].healthy = True  # and it may come back
    wait_until(lambda: len(pair.fleet.ready) == 2)
    assert pair.ask().status_code == 200


def test_who_takes_no_connections_is_not_asked_again(pair):
    pair.servers[0].stop()
    pair.servers[0].join()
    assert [pair.ask().status_code for _ in range(4)] == [200] * 4
    assert pair.fleet.replicas[0].state is State.DOWN


def test_what_breaks_off_is_told(tokenizer):
    """A replica whose process is gone in the middle of an answer."""

    async def die(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0] or 0)
        asked = await reader.readexactly(length) if length else b""
        if "GET /ready" in head:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        elif b"stream" in asked:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
            writer.write(b"10\r\ndata: {}\n\ndata: \r\n")
        await writer.drain()
        writer.close()

    async def ask():
        broken = await asyncio.start_server(die, "127.0.0.1", 0)
        port = broken.sockets[0].getsockname()[1]
        fleet = Fleet({"model": "none"}, [])
        replica = Replica("0", {"model": "none"}, {})
        replica._reserved.close()
        replica.port, replica.start, replica.watch = port, _nothing, _ready(replica)
        fleet.replicas = [replica]
        with live(create_front(fleet)) as front:
            async with httpx.AsyncClient(base_url=front.base_url) as client:
                cut = await client.post("/v1/completions", json={"stream": True})
                lost = await client.post("/v1/completions", json={})
        broken.close()
        return cut, lost, replica

    cut, lost, replica = asyncio.run(ask())
    first, told, done = [line for line in cut.text.splitlines() if line]
    assert (first, done) == ("data: {}", "data: [DONE]")
    assert "has ended" in json.loads(told.removeprefix("data: "))["error"]["message"]
    assert lost.status_code == 500
    assert "has ended" in lost.json()["error"]["message"]
    assert (replica.failed, replica.outstanding) == (2, 0)


async def _nothing() -> None:
    """In place of a process."""


def _ready(replica):
    async def watch(client) -> None:
        replica.state = State.READY

    return watch


def test_each_replica_sees_its_own_devices():
    told = device_environments(2, 2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert [each["CUDA_VISIBLE_DEVICES"] for each in told] == ["4,5", "6,7"]
    assert [each["TPU_VISIBLE_CHIPS"] for each in told] == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="need 4, and CUDA_VISIBLE_DEVICES names 1"):
        device_environments(2, 2, {"CUDA_VISIBLE_DEVICES": "0"})
    hidden = device_environments(2, 1, {"CUDA_VISIBLE_DEVICES": ""})
    assert hidden == [{"TPU_VISIBLE_CHIPS": "0"}, {"TPU_VISIBLE_CHIPS": "1"}]


def test_prompts_are_counted():
    bodies = [{"prompt": "a"}, {"prompt": ["a", "b"]}, {"prompt": [1, 2]}, {"prompt": [[1], [2]]}]
    bodies += [{"text": ["a"] * 3}, {"prompts": []}, {"messages": [{}]}, {"prompt": ["a", 1]}]
    found = [batch_of(json.dumps(body).encode(), 64) for body in bodies]
    assert [batch and len(batch.prompts) for batch in found] == [None, 2, None, 2, 3] + [None] * 3
    assert not any(batch_of(body, 64) for body in (b"", b"{", b"[1]", b"[" * 100_000))


def test_metrics_of_all_are_one_text():
    one = '# HELP a A.\n# TYPE a gauge\na{engine="0",m="x"} 1.0\n'
    own = '# HELP h H.\n# TYPE h counter\nh{method="GET"} 5.0\n'
    merged = merge_metrics([("0", one + own), ("1", one)])
    head = "# HELP a A.\n# TYPE a gauge\n"
    assert merged == head + 'a{engine="0",m="x"} 1.0\na{engine="1",m="x"} 1.0\n'
