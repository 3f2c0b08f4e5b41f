"""One request's way from the engine's thread to its reader: deltas, merged while nobody looks.

The engine's thread calls `news`; everything else belongs to asyncio's thread.
"""

import asyncio
from collections.abc import Iterable

from jaxgen.engine.outputs import CompletionOutput, RequestOutput
from jaxgen.serving.deltas import CompletionDelta, RequestDelta


class Stream:
    """What a reader has yet to see of a request. A reader that lags costs its own text, no more."""

    __slots__ = (
        "_arrived",
        "_error",
        "_first",
        "_output",
        "_pending",
        "_told",
        "finished",
        "request_id",
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.finished = False
        self._output: RequestOutput | None = None
        self._told: list[tuple[int, int, bool]] = []
        self._pending: list[CompletionDelta] = []
        self._arrived = asyncio.Event()
        self._error: BaseException | None = None
        self._first = True

    def follow(self, output: RequestOutput) -> None:
        """From now on `news` tells of this output; nothing of it has been told."""
        self._output = output
        self._told = [(0, 0, False)] * len(output.outputs)

    def news(self) -> list[CompletionDelta]:
        """What came since the last call. Nothing before the prompt's logprobs are complete."""
        assert self._output is not None
        if self._output.awaits_prompt_logprobs:
            return []
        deltas = []
        for index, completion in enumerate(self._output.outputs):
            tokens, characters, ended = self._told[index]
            now = (
                len(completion.token_ids),
                len(completion.text),
                completion.finish_reason is not None,
            )
            if now != (tokens, characters, ended):
                self._told[index] = now
                deltas.append(_delta(completion, tokens, characters))
        return deltas

    def add(self, deltas: Iterable[CompletionDelta], *, finished: bool) -> None:
        """Deltas for the reader; wakes it."""
        self._pending.extend(deltas)
        self.finished = finished
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """The reader gets what is there, then the error."""
        self._error = error
        self._arrived.set()

    async def next(self) -> RequestDelta:
        """All that came since the last call; waits until there is something. Raises what failed."""
        while not self._pending and not self.finished:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        output, first = self._output, self._first
        assert output is not None
        self._first = False
        pending, self._pending = self._pending, []
        return RequestDelta(
            request_id=self.request_id,
            prompt_token_ids=output.prompt_token_ids if first else [],
            cached_tokens=output.cached_tokens if first else 0,
            prompt_logprobs=output.prompt_logprobs if first else None,
            completions=pending if len(pending) == 1 else _merged(pending),
            finished=self.finished,
        )


def _delta(completion: CompletionOutput, tokens: int, characters: int) -> CompletionDelta:
    """What a completion has beyond so many tokens and characters."""
    logprobs = completion.logprobs
    return CompletionDelta(
        completion.index,
        completion.text[characters:],
        completion.token_ids[tokens:],
        None if logprobs is None else logprobs[tokens:],
        completion.finish_reason,
        completion.stop_reason,
        completion.error,
    )


def _merged(deltas: list[CompletionDelta]) -> list[CompletionDelta]:
    """One delta a continuation, in the order of their indices."""
    by_index: dict[int, list[CompletionDelta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [_joined(by_index[index]) for index in sorted(by_index)]


def _joined(deltas: list[CompletionDelta]) -> CompletionDelta:
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return CompletionDelta(
        last.index,
        "".join([delta.text for delta in deltas]),
        [token for delta in deltas for token in delta.token_ids],
        None
        if last.logprobs is None
        else [entry for delta in deltas for entry in delta.logprobs or ()],
        last.finish_reason,
        last.stop_reason,
        last.error,
    )
