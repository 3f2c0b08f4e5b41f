"""The status page in a real browser: it renders, it lives, it asks nobody but the server."""

import asyncio
import os
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from jaxgen.serving.app import create_app
from jaxgen.serving.settings import ServerSettings
from tests.serving.browser import chromium, page
from tests.serving.live import Live, live
from tests.serving.stub_engine import StubEngine

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="Chromium is not installed"),
]
PICTURES = os.environ.get("JAXGEN_PICTURES")
"""A folder: there the page is drawn, for people to look at."""


class BusyEngine(StubEngine):
    """Its counters grow while somebody is served."""

    def stats(self):
        from dataclasses import replace

        tokens = sum(len(prompt) for _, prompt, _ in self.asked)
        return replace(
            super().stats(),
            kv_used_blocks=len(self.running),
            generation_tokens=50 * len(self.asked) + self.told,
            prompt_tokens=tokens,
            prefix_queries=tokens,
            prefix_hits=tokens // 2,
        )

    told = 0

    async def generate(self, *args, **options):
        async for delta in super().generate(*args, **options):
            self.told += 1
            yield delta


@pytest.fixture
def busy(tokenizer) -> Generator[Live]:
    engine = BusyEngine(tokenizer, [" word"] * 40, seconds=0.05)
    names = ("llama", "<b>alias</b>")
    with live(create_app(engine, ServerSettings(served_model_names=names))) as server:
        yield server


async def load(base_url: str, count: int) -> None:
    body = {"prompt": "hello there", "max_tokens": 40}
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:
        await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(count)))


async def picture(tab, name: str) -> None:
    if PICTURES:
        await tab.picture(Path(PICTURES) / f"{name}.png")


def text(name: str) -> str:
    return f"document.getElementById({name!r})?.textContent"


def test_the_page_lives(busy, tmp_path):
    async def look():
        async with page(tmp_path) as tab:
            await tab.go(busy.base_url + "/")
            await tab.until(f"{text('state')} === 'ready'")
            assert await tab.value(text("models")) == "llama, <b>alias</b>"
            assert await tab.value("document.title") == "llama - jaxgen"
            assert await tab.value(text("running")) == "0"
            await tab.until(f"{text('written')} === '0'")
            running = asyncio.create_task(load(busy.base_url, 3))
            await tab.until(f"{text('running')} === '3'")
            await tab.until(f"{text('kv')} === '75.0 %'")
            await tab.until(f"Number({text('written')}) > 20")
            await tab.until("document.getElementById('line').getAttribute('points').length > 20")
            await picture(tab, "light")
            one = "{name: '0', state: 'down: <i>', outstanding: 1, served: 2, failed: 3}"
            await tab.value(f"list([{one}])")  # what the front of several replicas tells
            rows = await tab.value("document.querySelector('#replicas tbody').textContent")
            assert rows == "0down: <i>123"
            await picture(tab, "replicas")
            await tab.scheme("dark")
            await picture(tab, "dark")
            await running
            await tab.until(f"{text('running')} === '0'")
            assert await tab.value("document.scrollingElement.scrollWidth") <= 1000
            return tab.requested, tab.complaints

    requested, complaints = asyncio.run(look())
    assert complaints == []
    assert {url for url in requested if not url.startswith("data:")} == {
        busy.base_url + "/",
        busy.base_url + "/status.json",
    }


def test_the_page_tells_of_trouble(busy, tmp_path):
    async def look():
        async with page(tmp_path, width=380) as tab:
            await tab.go(busy.base_url + "/")
            await tab.until(f"{text('state')} === 'ready'")
            assert await tab.value("document.scrollingElement.scrollWidth") <= 380  # on a telephone
            busy.serving.engine.healthy, busy.serving.engine.error = False, "out of <memory>"
            await tab.until(f"{text('state')}.includes('out of <memory>')")
            await picture(tab, "trouble")
            busy.stop()
            await asyncio.to_thread(busy.join)
            await tab.until(f"{text('state')} === 'the server does not answer'")
            await picture(tab, "gone")

    asyncio.run(look())
