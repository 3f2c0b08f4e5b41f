"""An engine that dies is told of: to who waits, to who comes, and to who asks for health."""

import asyncio
import threading

import httpx
from starlette.testclient import TestClient

from jaxgen.serving.app import create_app
from jaxgen.serving.server import ListenSettings, Server, bind
from tests.serving.live import post, wait_until
from tests.serving.stub_engine import StubEngine


class _Killed(BaseException):
    """Nothing in the engine's thread expects this."""


def test_nobody_waits_for_a_dead_engine(mortal):
    engine, told = mortal.serving.engine, []

    def ask(stream):
        told.append(post(mortal, "/v1/completions", {"prompt": "hello", "stream": stream}))

    asyncio.run_coroutine_threadsafe(engine.pause(), engine._asyncio).result(30)
    waiting = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: engine.stats().waiting == 2)

    def die():
        raise _Killed

    engine._thread.order(die)
    for thread in waiting:
        thread.join(30)
    assert [answer.status_code for answer in told] == [500, 500]
    assert all("engine stopped" in answer.json()["error"]["message"] for answer in told)
    for path in ("/health", "/ready"):
        assert httpx.get(mortal.base_url + path).status_code == 503
    for path, body in (
        ("/v1/completions", {"prompt": "hello"}),
        ("/flush_cache", {}),
        ("/abort_request", {"abort_all": True}),
    ):
        refused = post(mortal, path, body)
        assert refused.status_code == 503
        assert "the engine has stopped" in refused.json()["error"]["message"]
    assert httpx.get(mortal.base_url + "/metrics").status_code == 200
    assert mortal.serving.active == 0


def test_who_is_stopped_while_it_compiles_does_not_end_that_first(tokenizer):
    begun, enough = threading.Event(), threading.Event()

    def prepare():
        begun.set()
        enough.wait(60)

    app = create_app(StubEngine(tokenizer, ["a"]), prepare=prepare)
    settings = ListenSettings(host="127.0.0.1", port=0)
    with bind(settings) as bound:
        server = Server(app, settings)
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        assert begun.wait(10)
        wait_until(lambda: server.started)
        server.stop()
        thread.join(10)
        assert not thread.is_alive()
        assert app.state.serving.preparing
    enough.set()


def test_a_preparation_that_is_broken_off_is_a_failure(tokenizer):
    def prepare():
        raise _Killed

    app = create_app(StubEngine(tokenizer, ["a"]), prepare=prepare)
    with TestClient(app) as client:
        wait_until(lambda: app.state.serving.failure is not None)
        assert "_Killed" in client.get("/health").json()["error"]["message"]
    assert not app.state.serving.preparing
