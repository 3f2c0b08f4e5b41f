"""The engine as asyncio sees it: streams of deltas, whatever becomes of requests or the engine."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from jaxgen.engine.counters import Tally
from jaxgen.engine.loop import GenerationLoop
from jaxgen.grammar.token_mask import MaskSource
from jaxgen.llm import LLM
from jaxgen.sampling import InvalidParameter, SamplingParams
from jaxgen.serving.async_engine_stream import Stream
from jaxgen.serving.async_engine_thread import EngineThread, News
from jaxgen.serving.deltas import RequestDelta
from jaxgen.serving.stats import EngineStats, FinishedRequest, cache_config_of, stats_of
from jaxgen.text.tokenizer import Tokenizer
from jaxgen_checkpoints.errors import RefusedInput

SHORT_TEXT = 2000
"""Characters that are tokenised at once; longer prompts go to a thread, others go on meanwhile."""

LONGEST_STOP = 10.0
"""Seconds that the step which is under way may take when the engine stops."""

LONGEST_COMPILE = 30.0
"""Seconds that a request's rules may take; the grammar library gives up long before."""

type Listener = Callable[[FinishedRequest], None]


class EngineDead(RuntimeError):
    """The engine's thread has ended, and with it every request; it says why."""


class AsyncEngine:
    """A generation loop in a thread of its own.

    model_name, tokenizer (None: prompts are token ids, and so are answers), max_context (tokens).
    One event loop uses it: the one that `start` ran in.
    """

    def __init__(
        self, loop: GenerationLoop, *, name: str, tokenizer: Tokenizer | None = None
    ) -> None:
        self.model_name = name
        self.tokenizer = tokenizer
        self.max_context = loop.max_context
        self._thread = EngineThread(loop, post=self._post, died=self._died)
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, Stream] = {}
        self._listeners: list[Listener] = []
        self._answers: set[asyncio.Future[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._error: str | None = None

    @classmethod
    def of(cls, llm: LLM, *, name: str) -> "AsyncEngine":
        """Takes over an LLM's engine: from now on the LLM itself generates nothing."""
        return cls(llm.hand_over(), name=name, tokenizer=llm.tokenizer)

    @property
    def healthy(self) -> bool:
        """Whether requests are served."""
        return self._error is None and self._thread.alive

    @property
    def error(self) -> str | None:
        """Why the engine's thread ended; None while it runs."""
        return self._error

    async def start(self) -> None:
        """Starts the engine's thread."""
        self._asyncio = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, drain_seconds: float = 0) -> None:
        """Takes no more requests, waits so long for those that run, aborts the rest, ends."""
        self._closing = True
        if self._asyncio is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain_seconds)
        with contextlib.suppress(TimeoutError, EngineDead):
            await asyncio.wait_for(self.abort(None), LONGEST_STOP)
        self._thread.stop()
        await asyncio.to_thread(self._thread.join, LONGEST_STOP)

    async def generate(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestDelta]:
        """Deltas until the last one, which is `finished`; leaving earlier aborts the request.

        A reader that lags gets what several steps brought as one delta. Raises before the first
        delta, and queues nothing, for what can never be served: RefusedInput, SchedulingError,
        ValueError for a request id in use. EngineDead whenever the engine has died.
        """
        self._check_open()
        ids = await self._encode(prompt)
        if request_id in self._streams:
            raise ValueError(f"request {request_id} is in the engine already")
        stream = Stream(request_id)
        self._streams[request_id] = stream
        self._idle.clear()
        try:
            text = prompt if isinstance(prompt, str) else None
            await self._submit(stream, ids, params, text, priority, cache_salt)
            finished = False
            while not finished:
                while not stream.ready:
                    await stream.arrival()
                delta = stream.take()
                finished = delta.finished
                yield delta
        finally:
            del self._streams[request_id]
            if not stream.finished:
                self._thread.order(lambda: self._thread.abort([request_id]))
            if not self._streams:
                self._idle.set()

    async def abort(self, request_id: str | None) -> None:
        """Ends a request, or all for None: their readers get a last delta that says so."""
        names = None if request_id is None else [request_id]
        await self.call(lambda: self._thread.abort(names))

    async def pause(self) -> None:
        """Computes nothing until `resume`; requests are taken and wait."""
        await self.call(lambda: self._thread.pause(True))

    async def resume(self) -> None:
        """Goes on after `pause`."""
        await self.call(lambda: self._thread.pause(False))

    async def reset_prefix_cache(self) -> None:
        """No request begins with what was computed before; those that run are not disturbed."""
        await self.call(self._thread.loop.engine.reset_prefix_cache)

    async def call[T](self, function: Callable[[], T]) -> T:
        """What `function` gives or raises, called in the engine's thread between two steps."""
        loop = self._asyncio
        if loop is None or self._error is not None:
            raise EngineDead(self._error or "the engine has not been started")
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = function()
            except (RuntimeError, ValueError) as error:
                loop.call_soon_threadsafe(_refuse, answer, error)
            else:
                loop.call_soon_threadsafe(_settle, answer, result)

        self._answers.add(answer)
        try:
            self._thread.order(run)
            return await answer
        finally:
            self._answers.discard(answer)

    def stats(self) -> EngineStats:
        """The load now, and the counters."""
        return stats_of(self._thread.loop)

    @property
    def step_tokens(self) -> Tally:
        """Tokens of each step so far, prompts' and continuations' together; grows on."""
        return self._thread.loop.counters.step_tokens

    @property
    def waiting_deferred(self) -> int:
        """Of the continuations that wait, those that wait for a grammar's mask, not for room."""
        return self._thread.loop.deferred

    def cache_config(self) -> dict[str, str]:
        """How the KV cache is set up, by vLLM's names."""
        return cache_config_of(self._thread.loop.engine)

    def add_listener(self, listener: Listener) -> None:
        """Has `listener` called, in asyncio's thread, with each request that ends."""
        self._listeners.append(listener)

    async def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RefusedInput("the checkpoint has no tokenizer: give the prompt as token ids")
        if len(prompt) <= SHORT_TEXT:
            return tokenizer.encode(prompt)
        return await asyncio.to_thread(tokenizer.encode, prompt)

    async def _submit(
        self,
        stream: Stream,
        ids: Sequence[int],
        params: SamplingParams,
        text: str | None,
        priority: int,
        cache_salt: str | None,
    ) -> None:
        arrival = time.monotonic()
        rules = await self._compile(params) if params.masked else ()

        def submit() -> None:
            output = self._thread.loop.submit(
                stream.request_id,
                ids,
                params,
                prompt=text,
                priority=priority,
                arrival=arrival,
                cache_salt=cache_salt,
                rules=rules,
            )
            self._thread.follow(stream, output)

        await self.call(submit)

    async def _compile(self, params: SamplingParams) -> Sequence[MaskSource]:
        compiling = asyncio.to_thread(self._thread.loop.rules.compile, params)
        try:
            return await asyncio.wait_for(compiling, LONGEST_COMPILE)
        except TimeoutError:
            message = f"took more than {LONGEST_COMPILE:.0f} s to compile: ask for less"
            slow = "bad_words" if params.structured_outputs is None else "structured_outputs"
            raise InvalidParameter(slow, message) from None

    def _check_open(self) -> None:
        if self._closing:
            raise EngineDead("the engine is being stopped")
        if self._error is not None or self._asyncio is None:
            raise EngineDead(self._error or "the engine has not been started")

    def _post(self, news: News) -> None:
        """In the engine's thread: one wake-up of asyncio for all that a step brought."""
        assert self._asyncio is not None
        self._asyncio.call_soon_threadsafe(self._deliver, news)

    def _deliver(self, news: News) -> None:
        for stream, deltas, record in news:
            stream.add(deltas, finished=record is not None)
        if self._listeners:
            for _, _, record in news:
                if record is not None:
                    for listener in self._listeners:
                        listener(record)

    def _died(self, reason: str) -> None:
        """In the engine's thread, as the last thing that it does."""
        assert self._asyncio is not None
        with contextlib.suppress(RuntimeError):  # asyncio has ended before: nobody is left to tell
            self._asyncio.call_soon_threadsafe(self._tell_death, reason)

    def _tell_death(self, reason: str) -> None:
        self._error = reason
        for stream in self._streams.values():
            stream.fail(EngineDead(reason))
        for answer in self._answers:
            _refuse(answer, EngineDead(reason))


def _settle[T](answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _refuse(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
