"""The thread that owns the engine: takes orders from a queue, steps, tells what came of it.

It waits for nothing but orders and the device. What it tells goes to `post`, once a step.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

from jaxgen.engine.loop import GenerationLoop
from jaxgen.engine.outputs import RequestOutput
from jaxgen.engine.runner import StepFailed
from jaxgen.serving.async_engine_stream import Stream
from jaxgen.serving.deltas import CompletionDelta
from jaxgen.serving.stats import FinishedRequest

logger = logging.getLogger(__name__)

ORDERS_A_STEP = 64
"""Orders taken between two steps: a burst of requests must not hold up those that run."""

MOST_FAILURES = 3
"""Steps that may fail on the device before the engine is given up, if none between them gave a
token: that a step could be sent says nothing, most fail when they are read.
"""

type News = list[tuple[Stream, list[CompletionDelta], FinishedRequest | None]]
"""For each request that got something: its stream, what, and its record if it has ended."""


class EngineThread:
    """Runs a generation loop. Orders are functions that it calls between steps, in order."""

    def __init__(
        self,
        loop: GenerationLoop,
        *,
        post: Callable[[News], None],
        died: Callable[[str], None],
    ) -> None:
        """post, died: called in the thread; died: why, when no step will come any more."""
        self.loop = loop
        self._post = post
        self._died = died
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._followed: dict[str, tuple[Stream, RequestOutput]] = {}
        self._open = True
        self._paused = False
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="jaxgen-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begins to take orders."""
        self._thread.start()

    def order(self, order: Callable[[], None]) -> None:
        """Has the thread call `order`, which must not raise, between two steps."""
        self._orders.put(order)

    def stop(self) -> None:
        """Ends the thread after the step that it is in."""
        self._orders.put(self._close)

    def join(self, seconds: float) -> None:
        """Waits for its end."""
        self._thread.join(seconds)

    def follow(self, stream: Stream, output: RequestOutput) -> None:
        """In the thread: what the output grows by goes to the stream."""
        stream.follow(output)
        self._followed[output.request_id] = (stream, output)

    def abort(self, request_ids: Sequence[str] | None) -> None:
        """In the thread: ends requests, all of them for None; their readers are told."""
        names = list(self._followed) if request_ids is None else request_ids
        ended = [self._followed[name][1] for name in names if name in self._followed]
        for output in ended:
            self.loop.abort(output.request_id)
        self._tell(ended)

    def pause(self, paused: bool) -> None:
        """In the thread: no more steps until it is called with False."""
        self._paused = paused

    def _close(self) -> None:
        self._open = False

    def _run(self) -> None:
        reason = "the engine was stopped"
        try:
            while self._open:
                self._take_orders()
                if self._open and self._busy:
                    self._step()
        except BaseException as error:  # whatever it is, nobody may wait for this thread for ever
            reason = f"{type(error).__name__}: {error}"
            logger.exception("the engine's thread died")
        finally:
            self._died(reason)

    @property
    def _busy(self) -> bool:
        return self.loop.has_unfinished and not self._paused

    def _take_orders(self) -> None:
        """Some of the orders that wait; sleeps for one if there is nothing to compute."""
        if not self._busy:
            self._orders.get()()
        for _ in range(ORDERS_A_STEP):
            try:
                order = self._orders.get_nowait()
            except Empty:
                return
            order()

    def _step(self) -> None:
        try:
            changed = self.loop.step()
            if changed:
                self._failures = 0
        except StepFailed:
            self._failures += 1
            if self._failures >= MOST_FAILURES:
                raise
            logger.exception("a step failed; its requests are ended, the next ones are served")
            changed = [output for _, output in self._followed.values()]
        self._tell(changed)

    def _tell(self, outputs: Iterable[RequestOutput]) -> None:
        news: News = []
        for output in outputs:
            followed = self._followed.get(output.request_id)
            if followed is None:
                continue
            stream = followed[0]
            deltas, record = stream.news(), None
            if stream.told_all:
                del self._followed[output.request_id]
                record = _record(output)
            elif not deltas:
                continue
            news.append((stream, deltas, record))
        if news:
            self._post(news)


def _record(output: RequestOutput) -> FinishedRequest:
    times = output.times
    return FinishedRequest(
        request_id=output.request_id,
        arrival=times.arrival,
        first_scheduled=times.first_scheduled,
        first_token=times.first_token,
        finished=time.monotonic(),
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.cached_tokens,
        generated_tokens=sum(len(completion.token_ids) for completion in output.outputs),
        longest_tokens=max(len(completion.token_ids) for completion in output.outputs),
        max_tokens=output.max_tokens,
        n=len(output.outputs),
        preemptions=times.preemptions,
        finish_reasons=tuple(
            completion.finish_reason
            for completion in output.outputs
            if completion.finish_reason is not None
        ),
    )
