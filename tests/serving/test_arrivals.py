"""Requests that come together reach the engine as they are read, not when the last one is."""

import asyncio
import json

import pytest

from jaxgen.serving.app import create_app
from jaxgen.serving.settings import ServerSettings
from tests.serving.stub_engine import StubEngine

TOGETHER = 3
IDS = {"prompt": [5, 6]}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class Recording(StubEngine):
    """Notes when it is given a request."""

    def __init__(self, tokenizer, seen):
        super().__init__(tokenizer, ["one"])
        self.seen = seen

    def generate(self, *arguments, **options):
        self.seen.append("begun")
        return super().generate(*arguments, **options)


async def post(app, path, body, seen):
    """One request whose body is there at once; its answer's status."""
    sent, status = json.dumps(body).encode(), []
    messages = [{"type": "http.request", "body": sent, "more_body": False}]

    async def receive():
        if messages:
            seen.append("read")
            return messages.pop()
        return await asyncio.Future()  # the client waits

    async def send(message):
        if message["type"] == "http.response.start":
            status.append(message["status"])

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "scheme": "http"}
    scope |= {"headers": [(b"content-type", b"application/json")], "http_version": "1.1"}
    scope |= {"server": ("localhost", 80), "client": ("localhost", 1), "state": {}}
    await app(scope, receive, send)
    return status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", IDS), ("/v1/chat/completions", CHAT), ("/v1/responses", {"input": "hi"})],
)
def test_the_engine_has_the_first_before_the_last_is_read(tokenizer, path, body, stream):
    seen = []
    app = create_app(Recording(tokenizer, seen), ServerSettings())

    async def together():
        async with app.router.lifespan_context(app):
            while not app.state.serving.ready:
                await asyncio.sleep(0)
            asked = (post(app, path, {**body, "stream": stream}, seen) for _ in range(TOGETHER))
            return await asyncio.gather(*asked)

    assert asyncio.run(together()) == [[200]] * TOGETHER
    assert seen == ["read", "begun"] * TOGETHER
