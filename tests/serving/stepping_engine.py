"""A stub engine that gives all its streams one token a step, as a real one does, for free."""

import asyncio
import time
from collections.abc import AsyncIterator

from jaxgen.engine.outputs import FinishReason
from jaxgen.serving.deltas import CompletionDelta, RequestDelta
from tests.serving.stub_engine import StubEngine

TEXT, STEP_SECONDS = " word", 0.005


class SteppingEngine(StubEngine):
    """wait: a step waits until every stream was read, so that each token comes alone.

    Otherwise a step comes every STEP_SECONDS whoever reads, and tokens that wait share a delta.
    """

    def __init__(self, tokenizer, *, wait: bool) -> None:
        super().__init__(tokenizer, [])
        self.max_context = 100_000
        self.wait = wait
        self.made = 0
        self._arrived: dict[str, asyncio.Event] = {}
        self._pending: dict[str, list[int]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def generate(
        self, request_id, prompt, params, *, priority=0, cache_salt=None
    ) -> AsyncIterator[RequestDelta]:
        event = self._arrived[request_id] = asyncio.Event()
        pending = self._pending[request_id] = []
        self._stepping = self._stepping or asyncio.create_task(self._step())
        told, ids = 0, list(prompt)
        try:
            while told < params.max_tokens:
                await event.wait()
                event.clear()
                tokens, pending[:] = pending[: params.max_tokens - told], []
                told += len(tokens)
                self.made += len(tokens)
                reason = FinishReason.LENGTH if told == params.max_tokens else None
                text = TEXT * len(tokens)
                completion = CompletionDelta(0, text, tokens, None, reason, None, None)
                done = reason is not None
                yield RequestDelta(request_id, ids, 0, None, [completion], done)
                ids = []
        finally:
            del self._arrived[request_id], self._pending[request_id]

    async def _step(self) -> None:
        before = time.monotonic()
        while True:
            steps = 0 if any(self._pending.values()) else 1
            if not self.wait:
                steps = int((time.monotonic() - before) / STEP_SECONDS)
                before += steps * STEP_SECONDS
            if steps:
                for name, event in self._arrived.items():
                    self._pending[name] += [5] * steps
                    event.set()
            await asyncio.sleep(0 if self.wait else STEP_SECONDS)
