"""Continuous batching: requests in, tokens out, the host one step ahead of the device.

Step n+1 is dispatched before step n's tokens are read: they feed it on the device. What ends a
request by count is known in advance; what ends it by content is found one step late, and the token
that was computed beyond it is dropped. Who is constrained by what it said sits out that step.
"""

import time
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from jaxgen.engine.continuation import Continuation
from jaxgen.engine.counters import Counters
from jaxgen.engine.engine import InferenceEngine
from jaxgen.engine.ledger import Ledger
from jaxgen.engine.outputs import FinishReason, RequestOutput
from jaxgen.engine.scoring import ScoredChunk, scored_chunks, scoring_bucket, targets
from jaxgen.grammar.rules import RuleCompiler
from jaxgen.grammar.token_mask import MaskSource
from jaxgen.ragged.batch import pack_rows
from jaxgen.ragged.buckets import Bucket
from jaxgen.sampling import Sampled, SamplingParams, TokenLogprobs, largest
from jaxgen.schedule.limits import Limits
from jaxgen.schedule.request import Status
from jaxgen.schedule.split_fuse import Plan
from jaxgen.schedule.verdict import SchedulingError, SchedulingResult
from jaxgen.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A dispatched step: which row samples for which continuation, and which prompts it scores."""

    sampled: Sampled
    rows: Items[int]
    continuations: Items[Continuation]
    scores: TokenLogprobs | None
    scored: tuple[ScoredChunk, ...]


class GenerationLoop:
    """Serves requests on an engine that it alone drives.

    eos_ids end a continuation unless its params ignore them. Without a tokenizer outputs have token
    ids only. overlap=False reads each step before the next is dispatched (for debugging).

    engine and counters are there to be read.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Tokenizer | None = None,
        *,
        eos_ids: Items[int] = (),
        overlap: bool = True,
    ) -> None:
        self.engine = engine
        self.counters = Counters()
        self._ledger = Ledger(engine, tokenizer, eos_ids)
        self._scheduler = self._ledger.scheduler
        self._in_flight: deque[_InFlight] = deque()
        self._depth = 1 if overlap else 0
        self._last_read = 0.0

    @property
    def rules(self) -> RuleCompiler:
        """Compiles, in any thread, what `submit` may be given."""
        return self._ledger.rules

    @property
    def limits(self) -> Limits:
        """The bounds of a step."""
        return self.engine.limits

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return self._ledger.longest

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still has tokens to come."""
        return self._ledger.unfinished

    @property
    def load(self) -> tuple[int, int]:
        """(continuations that run, those that wait)."""
        return self._ledger.load

    @property
    def deferred(self) -> int:
        """Of those that wait, how many do so for something else than room: a grammar's mask."""
        return sum(request.waits for request in self._scheduler.waiting)

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
        rules: Items[MaskSource] | None = None,
    ) -> RequestOutput:
        """Queues a prompt; `params.n` continuations of it are generated. Returns what will grow.

        arrival: in `time.monotonic` seconds. cache_salt: only prompts with the same one may share
        what is computed for them. rules: what `rules` made of the params; without it that is done
        here.

        Raises, and queues nothing, for what can never be served: SchedulingError (prompt or output
        too long), RefusedInput (token ids, parameters), ValueError (a request id in use).
        """
        return self._ledger.submit(
            request_id,
            prompt_ids,
            params,
            prompt=prompt,
            priority=priority,
            arrival=arrival,
            cache_salt=cache_salt,
            rules=rules,
        )

    def abort(self, request_id: str) -> None:
        """Ends a request at once; its output keeps what was generated. Unknown ids are fine."""
        self._ledger.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step and reads the one before; the outputs that got tokens or ended.

        Outputs are cumulative and the same objects each time. StepFailed, or whatever else breaks a
        step off, ends every request; the engine serves the next. SchedulingError if nothing can go
        on because sequences of `put` hold what the requests wait for.
        """
        ledger = self._ledger
        try:
            ledger.settle_masks()
            dispatched = self._dispatch()
            if self._in_flight and (not dispatched or len(self._in_flight) > self._depth):
                self._read(self._in_flight.popleft())
            elif not dispatched and ledger.masks.waiting:
                ledger.masks.wait()
        except BaseException as error:  # even an interrupt may come when the donated cache is gone
            self._in_flight.clear()
            try:  # first: an interrupt may have left what requests hold half changed
                self.engine.forget_everything()
            finally:
                ledger.fail_all(str(error) or type(error).__name__)
            raise
        changed = ledger.take_changed()
        if (
            not (changed or dispatched or self._in_flight or ledger.masks.waiting)
            and ledger.unfinished
        ):
            raise self._starved()
        return changed

    def _dispatch(self) -> bool:
        """Plans, packs and sends a step; False if there is nothing to compute."""
        plan = self._scheduler.begin_step()
        if plan.empty:
            return False
        engine, continuations = self.engine, self._ledger.continuations
        rows = [continuations[request.uid] for request in plan.requests]
        for request in plan.admitted:
            engine.runner.admit(engine.state[request.uid].slot, self._ledger.slot_row(request))
        emitting = [*range(len(plan.decodes))]
        emitting += [row for row, c in enumerate(plan.prompts, len(emitting)) if c.emit]
        samplers = [rows[row] for row in emitting] if plan.prompts else rows
        self._write_masks(samplers)
        scored: tuple[ScoredChunk, ...] = ()
        if self._ledger.scored:
            scored = scored_chunks(plan, self._ledger.scored, engine.buckets.row_alignment)
        buckets, packable = engine.buckets, self._scheduler.rows
        blocks = engine.state.arrays.widest(packable.indices)
        bucket = scoring_bucket(buckets, plan) if scored else buckets.fit(plan.counts, blocks)
        align = buckets.row_alignment
        packed = pack_rows(bucket, packable, engine.state, row_alignment=align)
        scores = None
        if scored:
            sampled, scores = engine.runner.score(bucket, packed, targets(scored, bucket.tokens))
        else:
            demand = largest({row.demand for row in rows})
            sampled = engine.runner.sample(bucket, packed, demand)
        self._scheduler.dispatched(plan)
        self._count(plan, bucket)
        self._in_flight.append(_InFlight(sampled, emitting, samplers, scores, scored))
        return True

    def _write_masks(self, samplers: Items[Continuation]) -> None:
        """Sends the masks of those who draw under one; they sit out until they are read."""
        slots, masks = [], []
        for continuation in samplers:
            constraint, request = continuation.constraint, continuation.request
            if constraint is not None:
                request.waits = constraint.changes
                slots.append(self.engine.state[request.uid].slot)
                masks.append(constraint.mask)
        if slots:
            self.engine.runner.write_masks(slots, np.stack(masks))

    def _count(self, plan: Plan, bucket: Bucket) -> None:
        counters, cache = self.counters, self.engine.state.prefix_cache
        tokens = self._scheduler.rows.token_ids.size
        counters.steps += 1
        # As vLLM counts: prompts' tokens, and those that are sampled; a decode's is one of these.
        counters.step_tokens.observe(tokens + sum(chunk.emit for chunk in plan.prompts))
        counters.padding_tokens += bucket.tokens - tokens
        counters.preemptions = self._scheduler.preemptions
        # A decode may compute the last token of a prompt, where just that one was left.
        begun = [row for row, request in enumerate(plan.decodes) if not request.output_ids]
        computed = sum(plan.starts[row] < len(plan.decodes[row].prompt_ids) for row in begun)
        for chunk in plan.prompts:
            computed += max(0, min(chunk.count, len(chunk.request.prompt_ids) - chunk.start))
        counters.prompt_tokens += computed
        if not plan.admitted:
            return
        if cache is not None:
            counters.prefix_hits, counters.prefix_queries = cache.hit_tokens, cache.queried_tokens
        now = time.monotonic()
        for request in plan.admitted:
            self._ledger.continuations[request.uid].scheduled(now)

    def _read(self, step: _InFlight) -> None:
        """Waits for a step's tokens and hands them to their requests.

        A step that samples nothing is waited for too, so that the host stays one step ahead.
        """
        sampled, scores = self.engine.runner.read((step.sampled, step.scores))
        now = time.monotonic()
        self.counters.last_step_seconds, self._last_read = now - self._last_read, now
        if scores is not None:
            for chunk in step.scored:
                chunk.read(scores)
        tokens, ledger = sampled.tokens.tolist(), self._ledger
        bad = sampled.bad.tolist() if sampled.bad.any() else None
        changed: list[RequestOutput] = []
        failed, finished = 0, Status.FINISHED
        for row, continuation in zip(step.rows, step.continuations, strict=True):
            request, output = continuation.request, continuation.output
            if request.status is finished:
                continue  # it ended while this step was under way
            changed.append(output)
            if bad is not None and bad[row]:
                self.counters.corrupted += continuation.fail_to_draw()
                ledger.end(request)
                failed += 1
                continue
            token = tokens[row]
            stop = continuation.receive(token, sampled, row)
            request.receive(token)
            if output.times.first_token is None:
                output.times.first_token = now
            if stop or len(request.output_ids) >= request.max_tokens:
                continuation.finish(FinishReason.LENGTH)
                ledger.end(request)
            elif request.waits and continuation.constraint is not None:
                ledger.masks.compute(request.uid, continuation.constraint, token)
        ledger.touch(changed)
        self.counters.generation_tokens += len(changed) - failed

    def _starved(self) -> SchedulingError:
        """Requests wait, none runs, no step is under way: whoever else uses the engine is why."""
        tracked = self.engine.capacity.free_sequences > 0
        result = (
            SchedulingResult.KVCacheLimitExceeded
            if tracked
            else SchedulingResult.EngineSequenceLimitExceeded
        )
        held = len(self.engine.state)
        return SchedulingError(result, f"Requests wait for what {held} sequences of `put` hold.")
