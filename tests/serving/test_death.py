"""An engine that dies is told of: to who waits, to who comes, and to who asks for health."""

import asyncio
import threading

import httpx

from tests.serving.live import post, wait_until


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
    refused = post(mortal, "/v1/completions", {"prompt": "hello"})
    assert refused.status_code == 503
    assert "the engine has stopped" in refused.json()["error"]["message"]
    assert httpx.get(mortal.base_url + "/metrics").status_code == 200
    assert mortal.serving.active == 0
