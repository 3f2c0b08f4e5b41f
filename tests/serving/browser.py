"""A page in headless Chromium, told what to do over its debugging socket."""

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0"),
)
SECONDS = 30


def chromium() -> str | None:
    """Where Chromium is; None where it is not installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. requested: every URL that it asked for. complaints: what its console says."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requested: list[str] = []
        self.complaints: list[Any] = []
        self._socket = socket
        self._session: str | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def open(self, width: int, height: int) -> None:
        """Makes the tab."""
        made = await self.call("Target.createTarget", url="about:blank")
        target = {"targetId": made["targetId"], "flatten": True}
        self._session = (await self.call("Target.attachToTarget", **target))["sessionId"]
        for domain in ("Network", "Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def go(self, url: str) -> None:
        """Begins to load a page."""
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression is in the page."""
        told = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, expression: str) -> None:
        """Returns when an expression is true; fails after SECONDS."""
        async with asyncio.timeout(SECONDS):
            while not await self.value(expression):
                await asyncio.sleep(0.05)

    async def scheme(self, name: str) -> None:
        """Prefers `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def picture(self, path: Path) -> None:
        """Writes the tab as PNG."""
        told = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(told["data"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        sent: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            sent["sessionId"] = self._session
        await self._socket.send_json(sent)
        async with asyncio.timeout(SECONDS):
            told = await answer
        assert "error" not in told, f"{method}: {told}"
        return told["result"]

    async def close(self) -> None:
        """Ends the browser."""
        with suppress(TimeoutError, ConnectionError):
            await self.call("Browser.close")
        self._reading.cancel()

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Network.requestWillBeSent":
                self.requested.append(told["params"]["request"]["url"])
            elif told["method"] in (
                "Runtime.consoleAPICalled",
                "Runtime.exceptionThrown",
                "Log.entryAdded",
            ):
                self.complaints.append(told["params"])


@asynccontextmanager
async def page(folder: Path, *, width: int = 1000, height: int = 760) -> AsyncGenerator[Page]:
    """A tab of a new browser, whose profile is in `folder`."""
    program = chromium()
    assert program is not None, "Chromium is not installed"
    errors = asyncio.subprocess.PIPE
    words = [*OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    browser = await asyncio.create_subprocess_exec(program, *words, stderr=errors)
    try:
        address = await asyncio.wait_for(_address(browser), SECONDS)
        async with aiohttp.ClientSession() as session, session.ws_connect(address) as socket:
            tab = Page(socket)
            try:
                await tab.open(width, height)
                yield tab
            finally:
                await tab.close()
    finally:
        with suppress(ProcessLookupError):
            browser.kill()
        await browser.wait()


async def _address(browser: asyncio.subprocess.Process) -> str:
    assert browser.stderr is not None
    async for line in browser.stderr:
        _, found, address = line.decode().partition("DevTools listening on ")
        if found:
            return address.strip()
    raise AssertionError("Chromium ended before it listened")
