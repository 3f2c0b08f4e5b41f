"""One request's way from the engine's thread to its reader: deltas, merged while nobody looks.

The engine's thread calls `follow`, `news` and `told_all`; everything else belongs to asyncio's.
"""

import asyncio

from jaxgen.engine.outputs import RequestOutput
from jaxgen.serving.deltas import CompletionDelta, RequestDelta


class Stream:
    """What a reader has yet to see of a request. A reader that lags costs its own text, no more."""

    __slots__ = (
        "_ended",
        "_error",
        "_first",
        "_output",
        "_pending",
        "_told",
        "_waiter",
        "finished",
        "request_id",
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.finished = False
        self._output: RequestOutput | None = None
        self._told: list[tuple[int, int]] = []
        self._ended: set[int] = set()
        self._pending: list[CompletionDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._first = True

    def follow(self, output: RequestOutput) -> None:
        """From now on `news` tells of this output; nothing of it has been told."""
        self._output = output
        self._told = [(0, 0)] * len(output.outputs)

    @property
    def told_all(self) -> bool:
        """Whether `news` has told of the end of every continuation."""
        return len(self._ended) == len(self._told)

    def news(self) -> list[CompletionDelta]:
        """What came since the last call. Nothing before the prompt's logprobs are complete."""
        output = self._output
        assert output is not None
        if output.prompt_logprobs is not None and output.awaits_prompt_logprobs:
            return []
        deltas = []
        for index, completion in enumerate(output.outputs):
            tokens, told = self._told[index]
            ids, ended = completion.token_ids, completion.finish_reason is not None
            if len(ids) == tokens and not (ended and index not in self._ended):
                continue
            if ended:
                self._ended.add(index)
            pieces, logprobs = completion.pieces, completion.logprobs
            self._told[index] = (len(ids), len(pieces))
            deltas.append(
                CompletionDelta(
                    index,
                    "".join(pieces[told:]),
                    ids[tokens:],
                    None if logprobs is None else logprobs[tokens:],
                    completion.finish_reason,
                    completion.stop_reason,
                    completion.error,
                    completion.refused,
                )
            )
        return deltas

    def add(self, deltas: list[CompletionDelta], *, finished: bool) -> None:
        """Deltas for the reader; wakes it."""
        self._pending += deltas
        self.finished = finished
        self._wake()

    def fail(self, error: BaseException) -> None:
        """The reader gets what is there, then the error."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def ready(self) -> bool:
        """Whether `take` has something to give. Raises what failed, if that is all there is."""
        if self._pending or self.finished:
            return True
        if self._error is not None:
            raise self._error
        return False

    def arrival(self) -> asyncio.Future[None]:
        """To be awaited by the one reader before it looks again."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def take(self) -> RequestDelta:
        """All that came since the last call."""
        output, first = self._output, self._first
        assert output is not None
        self._first = False
        pending, self._pending = self._pending, []
        completions = pending if len(pending) == 1 else _merged(pending)
        if not first:
            return RequestDelta(self.request_id, [], 0, None, completions, self.finished)
        return RequestDelta(
            self.request_id,
            output.prompt_token_ids,
            output.cached_tokens,
            output.prompt_logprobs,
            completions,
            self.finished,
        )


def _merged(deltas: list[CompletionDelta]) -> list[CompletionDelta]:
    """One delta a continuation, in the order of their indices."""
    if len({delta.index for delta in deltas}) == 1:
        return [_joined(deltas)]
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
        last.refused,
    )
