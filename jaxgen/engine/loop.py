"""Continuous batching: requests in, tokens out, the host one step ahead of the device.

Step n+1 is dispatched before step n's tokens are read: they feed it on the device. What ends a
request by count is known in advance; what ends it by content is found one step late, and the token
that was computed beyond it is dropped.
"""

import itertools
import time
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from jaxgen.engine.continuation import Continuation
from jaxgen.engine.counters import Counters
from jaxgen.engine.engine import InferenceEngine
from jaxgen.engine.outputs import FinishReason, RequestOutput, RequestTimes
from jaxgen.ragged.batch import BatchItem, pack
from jaxgen.sampling import InvalidParameter, Sampled, SamplingParams, SlotRow, largest, slot_row
from jaxgen.schedule.limits import Limits
from jaxgen.schedule.request import Request
from jaxgen.schedule.scheduler import Scheduler
from jaxgen.schedule.split_fuse import Plan
from jaxgen.schedule.verdict import SchedulingError, SchedulingResult
from jaxgen.text.tokenizer import Tokenizer

_FIRST_UID = 1 << 40  # far from the uids that callers of `put` choose


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A dispatched step: which row samples for which request."""

    sampled: Sampled
    rows: tuple[tuple[int, Request], ...]


class GenerationLoop:
    """Serves requests on an engine that it alone drives.

    eos_ids end a continuation unless its params ignore them. Without a tokenizer outputs have token
    ids only. overlap=False reads each step before the next is dispatched (for debugging).
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Tokenizer | None = None,
        *,
        eos_ids: Items[int] = (),
        overlap: bool = True,
    ) -> None:
        self.counters = Counters()
        self._engine = engine
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._scheduler = Scheduler(engine.limits, engine.state)
        self._continuations: dict[int, Continuation] = {}
        self._outputs: dict[str, RequestOutput] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._depth = 1 if overlap else 0
        self._uids = itertools.count(_FIRST_UID)
        self._seeds = np.random.default_rng(engine.config.seed)
        self._last_read = 0.0

    @property
    def engine(self) -> InferenceEngine:
        """The engine, to be looked at."""
        return self._engine

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return self._engine.state.max_context

    @property
    def load(self) -> tuple[int, int]:
        """(continuations that run, those that wait)."""
        waiting = len(self._scheduler.waiting)
        return len(self._continuations) - waiting, waiting

    @property
    def limits(self) -> Limits:
        """The bounds of a step."""
        return self._engine.limits

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still has tokens to come."""
        return bool(self._outputs)

    def submit(
        self,
        request_id: str,
        prompt_ids: Items[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        arrival: float = 0.0,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Queues a prompt; `params.n` continuations of it are generated. Returns what will grow.

        arrival: in `time.monotonic` seconds. cache_salt: only prompts with the same one may share
        what is computed for them.

        Raises, and queues nothing, for what can never be served: SchedulingError (prompt or output
        too long), RefusedInput (token ids, parameters), ValueError (a request id in use).
        """
        if request_id in self._outputs:
            raise ValueError(f"request {request_id} is in the engine already")
        if params.prompt_logprobs is not None:
            raise InvalidParameter("prompt_logprobs", "is not supported by generation yet")
        vocab = int(self._engine.model.config.vocab_size)
        params.validate(vocab)
        ids = self._engine.check_tokens(request_id, prompt_ids).tolist()
        output = RequestOutput(request_id, prompt, ids, [], times=RequestTimes(arrival))
        seed = params.seed if params.seed is not None else int(self._seeds.integers(1 << 62))
        begun: list[Request] = []
        try:
            for index in range(params.n):
                request = self._request(ids, params, priority, arrival)
                self._scheduler.submit(request)
                begun.append(request)
                output.max_tokens = request.max_tokens
                self._continuations[request.uid] = Continuation(
                    request, output, index, params, seed + index, self._eos_ids, self._tokenizer
                )
            self._slot_row(begun[0])  # refuses now what admission would refuse in mid-step
        except (RuntimeError, ValueError):
            for request in begun:
                self._end(request)
            raise
        self._outputs[request_id] = output
        return output

    def abort(self, request_id: str) -> None:
        """Ends a request at once; its output keeps what was generated. Unknown ids are fine."""
        for continuation in self._of(request_id):
            continuation.finish(FinishReason.ABORT)
            self._end(continuation.request)
        self._outputs.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step and reads the one before; the outputs that got tokens or ended.

        Outputs are cumulative and the same objects each time. StepFailed, or whatever else breaks a
        step off, ends every request; the engine serves the next. SchedulingError if nothing can go
        on because sequences of `put` hold what the requests wait for.
        """
        try:
            dispatched = self._dispatch()
            if self._in_flight and (not dispatched or len(self._in_flight) > self._depth):
                return self._read(self._in_flight.popleft())
        except BaseException as error:  # even an interrupt may come when the donated cache is gone
            self._fail_all(str(error) or type(error).__name__)
            raise
        if not dispatched and self._outputs:
            raise self._starved()
        return []

    def _request(
        self, ids: list[int], params: SamplingParams, priority: int, arrival: float
    ) -> Request:
        room = max(1, self._engine.state.max_context - len(ids))
        wanted = room if params.max_tokens is None else params.max_tokens
        return Request(next(self._uids), ids, max_tokens=wanted, priority=priority, arrival=arrival)

    def _dispatch(self) -> bool:
        """Plans, packs and sends a step; False if there is nothing to compute."""
        plan = self._scheduler.begin_step()
        if not plan.chunks:
            return False
        engine = self._engine
        for request in plan.admitted:
            engine.runner.admit(engine.state[request.uid].slot, self._slot_row(request))
        items = [
            BatchItem(engine.state[chunk.request.uid], chunk.token_ids, emit=chunk.emit)
            for chunk in plan.chunks
        ]
        bucket = engine.buckets.fit([len(item.tokens) for item in items])
        packed = pack(bucket, items, engine.state, row_alignment=engine.buckets.row_alignment)
        self._count(plan)
        demand = largest(self._continuations[chunk.request.uid].demand for chunk in plan.chunks)
        sampled = engine.runner.sample(bucket, packed, demand)
        self._scheduler.dispatched(plan)
        self._in_flight.append(_InFlight(sampled, _emitting(plan)))
        return True

    def _count(self, plan: Plan) -> None:
        now = time.monotonic()
        counters = self.counters
        counters.steps += 1
        for chunk in plan.chunks:
            prompt = len(chunk.request.prompt_ids)
            counters.prompt_tokens += max(0, min(chunk.count, prompt - chunk.start))
        for request in plan.preempted:
            counters.preemptions += 1
            self._continuations[request.uid].output.times.preemptions += 1
        for request in plan.admitted:
            times = self._continuations[request.uid].output.times
            if times.first_scheduled is None:
                times.first_scheduled = now

    def _slot_row(self, request: Request) -> SlotRow:
        continuation = self._continuations[request.uid]
        return slot_row(
            continuation.params,
            vocab_size=int(self._engine.model.config.vocab_size),
            seed=continuation.seed,
            eos_ids=() if continuation.params.ignore_eos else self._eos_ids,
            prompt_ids=request.prompt_ids,
            output_ids=request.output_ids,
        )

    def _read(self, step: _InFlight) -> list[RequestOutput]:
        """Waits for a step's tokens and hands them to their requests.

        A step that samples nothing is waited for too, so that the host stays one step ahead.
        """
        sampled = self._engine.runner.read(step.sampled)
        now = time.monotonic()
        self.counters.last_step_seconds, self._last_read = now - self._last_read, now
        changed: dict[str, RequestOutput] = {}
        for row, request in step.rows:
            continuation = self._continuations.get(request.uid)
            if continuation is None:
                continue  # it ended while this step was under way
            if sampled.bad[row]:
                continuation.fail("the model's logits are not finite")
                self._end(request)
            else:
                token = int(sampled.tokens[row])
                stop = continuation.receive(token, sampled, row)
                self._scheduler.receive(request, token, stop=stop)
                self.counters.generation_tokens += 1
                if continuation.output.times.first_token is None:
                    continuation.output.times.first_token = now
                if stop or len(request.output_ids) >= request.max_tokens:
                    continuation.finish(FinishReason.LENGTH)
                    self._end(request)
            changed[continuation.output.request_id] = continuation.output
        for request_id, output in changed.items():
            if output.finished:
                self._outputs.pop(request_id, None)
        return list(changed.values())

    def _of(self, request_id: str) -> list[Continuation]:
        return [c for c in self._continuations.values() if c.output.request_id == request_id]

    def _end(self, request: Request) -> None:
        self._scheduler.finish(request)
        self._continuations.pop(request.uid, None)

    def _fail_all(self, reason: str) -> None:
        self._in_flight.clear()
        for continuation in list(self._continuations.values()):
            continuation.fail(reason)
            self._end(continuation.request)
        self._outputs.clear()
        self._engine.forget_everything()

    def _starved(self) -> SchedulingError:
        """Requests wait, none runs, no step is under way: whoever else uses the engine is why."""
        tracked = self._engine.capacity.free_sequences > 0
        result = (
            SchedulingResult.KVCacheLimitExceeded
            if tracked
            else SchedulingResult.EngineSequenceLimitExceeded
        )
        held = len(self._engine.state)
        return SchedulingError(result, f"Requests wait for what {held} sequences of `put` hold.")


def _emitting(plan: Plan) -> tuple[tuple[int, Request], ...]:
    return tuple((row, chunk.request) for row, chunk in enumerate(plan.chunks) if chunk.emit)
