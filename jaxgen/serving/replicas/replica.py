"""One of several server processes: started, looked after, ended."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import httpx

from jaxgen.serving.server import ListenSettings, bind

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_END_SECONDS = 20.0


class State(StrEnum):
    """Of a replica. Only those that are ready are given requests; one that has ended stays so."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    ENDED = "ended"


class Replica:
    """A `jaxgen serve` process on a loopback port of its own.

    name: its number. state, reason: what it is, and why it is not ready. outstanding: prompts that
    it has now. served, failed: requests it answered, and those that broke off.
    """

    def __init__(
        self, name: str, options: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        """options: of the command line, by their names there. environment: over this process'."""
        self.name = name
        self.state = State.STARTING
        self.reason = "the model is being loaded and compiled"
        self.outstanding = 0
        self.served = 0
        self.failed = 0
        # Bound here and never listened on: nobody else is given the port, and the process, which
        # binds it too, is the only one that listens.
        self._reserved = bind(ListenSettings(host="127.0.0.1", port=0), shared=True)
        self.port: int = self._reserved.getsockname()[1]
        self._options = {**options, "host": "127.0.0.1", "port": self.port}
        self._environment = {**os.environ, **environment}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Its process' number; None before it is started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process, which ends by itself when this one is gone."""
        words = ("-m", "jaxgen", "serve", str(self._options["model"]), "--replica")
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, *words),
            stdin=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # signals of a terminal are for the front process alone
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._options).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()

    async def watch(self, client: httpx.AsyncClient) -> None:
        """Keeps `state` true until the process has ended."""
        assert self._process is not None
        ended = asyncio.create_task(self._process.wait())
        try:
            while True:
                await self._look(client)
                done, _ = await asyncio.wait({ended}, timeout=_LOOK_SECONDS)
                if done:
                    self.state = State.ENDED
                    self.reason = f"its process ended with code {ended.result()}"
                    return
        finally:
            ended.cancel()

    async def _look(self, client: httpx.AsyncClient) -> None:
        try:
            answer = await client.get(f"{self.url}/ready", timeout=_ANSWER_SECONDS)
        except httpx.TransportError as error:
            self.lost(f"it does not answer: {error or type(error).__name__}")
            return
        if answer.status_code == httpx.codes.OK:
            self.state, self.reason = State.READY, ""
        else:
            self.lost(_reason(answer))

    def lost(self, reason: str) -> None:
        """It cannot be given requests; `watch` finds out whether that passes."""
        if self.state is State.READY or self.state is State.DOWN:
            self.state, self.reason = State.DOWN, reason

    async def stop(self) -> None:
        """Asks the process to end, and sees to it."""
        self._reserved.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_SECONDS)
                return
            process.kill()
            await process.wait()


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"it answers /ready with {answer.status_code}"
