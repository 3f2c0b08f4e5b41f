"""One HTTP request's prompts on the engine: their deltas as one stream, or all of it at the end."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from jaxgen.engine.outputs import FinishReason, TokenLogprob
from jaxgen.sampling import SamplingParams
from jaxgen.serving.context import Serving
from jaxgen.serving.deltas import CompletionDelta, RequestDelta
from jaxgen.serving.errors import ApiError, bad_request, unavailable
from jaxgen.serving.prompts import Prompt

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Work:
    """What one HTTP request asks of the engine: the prompts, each with the same params."""

    public_id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(slots=True)
class Grown:
    """A continuation that has ended."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Answered:
    """One prompt and all its continuations."""

    cached_tokens: int
    prompt_logprobs: list[TokenLogprob | None] | None
    completions: list[Grown]

    @property
    def generated(self) -> int:
        """Tokens of all continuations."""
        return sum(len(grown.token_ids) for grown in self.completions)


async def deltas(serving: Serving, work: Work) -> AsyncGenerator[tuple[int, RequestDelta]]:
    """The prompt's index and what it grew by, as it comes. Leaving aborts what is not finished.

    ApiError, or what the engine refuses with, before the first delta; ApiError when it fails.
    """
    choices = len(work.prompts) * work.params.n
    ids = [f"{work.public_id}#{next(_numbers)}" for _ in work.prompts]
    with serving.admitted(work.public_id, ids, choices):
        if len(ids) > 1:
            async with aclosing(_several(serving, work, ids)) as stream:
                async for item in stream:
                    yield item
            return
        watch = _Watch(serving)
        async with aclosing(_begin(serving, work, 0, ids[0])) as deltas_of_one:
            async for delta in deltas_of_one:  # each layer of generators costs every token
                watch.see(delta)
                yield 0, delta


async def collect(serving: Serving, work: Work) -> list[Answered]:
    """Everything that is generated, a result for each prompt."""
    results = [Answered(0, None, [Grown() for _ in range(work.params.n)]) for _ in work.prompts]
    async with aclosing(deltas(serving, work)) as stream:
        async for place, delta in stream:
            grow(results[place], delta)
    return results


def _begin(
    serving: Serving, work: Work, place: int, engine_id: str
) -> AsyncGenerator[RequestDelta]:
    stream = serving.engine.generate(
        engine_id,
        work.prompts[place].ids,
        work.params,
        priority=work.priority,
        cache_salt=work.cache_salt,
    )
    return cast("AsyncGenerator[RequestDelta]", stream)


class _Watch:
    """Looks at one prompt's deltas as they pass: the time between them, and how they end."""

    __slots__ = ("_before", "_observe", "_serving")

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._observe = serving.metrics.between_tokens
        self._before = 0.0

    def see(self, delta: RequestDelta) -> None:
        """ApiError for a continuation that did not end by itself."""
        now = time.monotonic()
        if self._before:
            self._observe(now - self._before)
        self._before = now
        for completion in delta.completions:
            if completion.finish_reason is not None:
                _check_end(self._serving, completion)


async def _several(
    serving: Serving, work: Work, ids: Sequence[str]
) -> AsyncGenerator[tuple[int, RequestDelta]]:
    """The streams of several prompts, mixed as they come; the first that fails fails all."""
    queue: asyncio.Queue[tuple[int, RequestDelta] | Exception | None] = asyncio.Queue(len(ids))

    async def pump(place: int, engine_id: str) -> None:
        watch = _Watch(serving)
        try:
            async with aclosing(_begin(serving, work, place, engine_id)) as stream:
                async for delta in stream:
                    watch.see(delta)
                    await queue.put((place, delta))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(place, name)) for place, name in enumerate(ids)]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _check_end(serving: Serving, completion: CompletionDelta) -> None:
    """ApiError for a continuation that did not end by itself."""
    if completion.finish_reason is FinishReason.ERROR:
        if completion.refused:
            raise bad_request(str(completion.error))
        raise ApiError(500, f"generation failed: {completion.error}")
    if completion.finish_reason is FinishReason.ABORT:
        why = "the server is stopping" if serving.draining else "the request was aborted"
        raise unavailable(why, serving.settings.retry_after_seconds)


def grow(result: Answered, delta: RequestDelta) -> None:
    """Adds what came to what is there."""
    if delta.prompt_token_ids:
        result.cached_tokens = delta.cached_tokens
        result.prompt_logprobs = delta.prompt_logprobs
    for completion in delta.completions:
        grown = result.completions[completion.index]
        grown.text += completion.text
        grown.token_ids += completion.token_ids
        if completion.logprobs is not None:
            grown.logprobs = [] if grown.logprobs is None else grown.logprobs
            grown.logprobs += completion.logprobs  # in place: a copy would cost every token more
        if completion.finish_reason is not None:
            grown.finish_reason = str(completion.finish_reason)
            grown.stop_reason = completion.stop_reason
