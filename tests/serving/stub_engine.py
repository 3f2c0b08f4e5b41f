"""An engine without a model: it answers every prompt with given texts, as fast as it is read."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from jaxgen.engine.counters import STEP_TOKEN_BOUNDS, Tally
from jaxgen.engine.outputs import FinishReason, TokenLogprob
from jaxgen.sampling import SamplingParams
from jaxgen.serving.deltas import CompletionDelta, RequestDelta
from jaxgen.serving.stats import EngineStats, FinishedRequest


class StubEngine:
    """AsyncEngine's public face. `texts` are the tokens' texts of every answer.

    seconds: between two tokens. asked: (request id, prompt, params) of all requests so far, ranked:
    (priority, cache salt) of each. ending: the last token and the stop reason of every answer.
    """

    def __init__(self, tokenizer, texts: Sequence[str], *, seconds: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.texts = list(texts)
        self.seconds = seconds
        self.max_context = 256
        self.model_name = "stub"
        self.healthy = True
        self.error: str | None = None
        self.asked: list[tuple[str, Sequence[int], SamplingParams]] = []
        self.ranked: list[tuple[int, str | None]] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.listeners = []
        self.fail_with: Exception | None = None
        self.ending: tuple[int, int | str | None] | None = None
        self.step_tokens = Tally(STEP_TOKEN_BOUNDS)
        self.waiting_deferred = 0

    async def start(self) -> None:
        """Nothing is to be started."""

    async def stop(self, drain_seconds: float = 0) -> None:
        self.healthy = False

    def add_listener(self, listener) -> None:
        self.listeners.append(listener)

    async def abort(self, request_id: str | None) -> None:
        self.aborted += self.running if request_id is None else [request_id]

    async def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    def stats(self) -> EngineStats:
        return EngineStats(len(self.running), 0, 1, 4, 0, 0, 10, 20, 0, 5, 0, 0.01, 6, 0, 7, 1.5)

    def cache_config(self) -> dict[str, str]:
        return {"block_size": "16", "num_gpu_blocks": "4"}

    async def generate(
        self, request_id, prompt, params, *, priority=0, cache_salt=None
    ) -> AsyncIterator[RequestDelta]:
        if self.fail_with is not None:
            raise self.fail_with
        self.asked.append((request_id, prompt, params))
        self.ranked.append((priority, cache_salt))
        self.running.add(request_id)
        began, told = time.monotonic(), 0
        texts = self.texts[: params.max_tokens]
        try:
            for place, text in enumerate(texts):
                await asyncio.sleep(self.seconds)
                last = place == len(texts) - 1
                ended = request_id in self.aborted
                reason = FinishReason.LENGTH if len(texts) == params.max_tokens else None
                reason = (reason or FinishReason.STOP) if last else None
                reason = FinishReason.ABORT if ended else reason
                told += 1
                ending = self.ending if last else None
                yield _delta(request_id, prompt, params, place, text, reason, ending)
                if ended:
                    return
        finally:
            self.running.discard(request_id)
            self._record(request_id, prompt, params, began, told)

    def _record(self, request_id, prompt, params, began, told) -> None:
        now = time.monotonic()
        record = FinishedRequest(
            *(request_id, began, began, now, now, len(prompt), 0, told, told),
            *(params.max_tokens, 1, 0),
            finish_reasons=(FinishReason.STOP,),
        )
        for listener in self.listeners:
            listener(record)


def _known(token, count) -> TokenLogprob:
    """Of a prompt's token, beside `count` of at most two; the one after its own is impossible."""
    return TokenLogprob(token, -1.5, ((token, -1.5), (token + 1, float("-inf")))[:count])


def _delta(request_id, prompt, params, place, text, reason, ending) -> RequestDelta:
    token, stop_reason = ending or (3 + place, None)
    logprobs = None
    if params.logprobs is not None:
        top = ((token, -0.25), (token + 1, float("-inf")))
        logprobs = [TokenLogprob(token, -0.25, top)]
    first = place == 0
    asked = first and params.prompt_logprobs is not None
    known = [None, *(_known(t, params.prompt_logprobs) for t in prompt[1:])] if asked else None
    completions = [
        CompletionDelta(index, text, [token], logprobs, reason, stop_reason, None)
        for index in range(params.n)
    ]
    ids = list(prompt) if first else []
    return RequestDelta(request_id, ids, 0, known, completions, reason is not None)
