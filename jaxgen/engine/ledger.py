"""The requests that a loop serves, from submission to their end, and what is told of them."""

import itertools
import logging
from collections.abc import Sequence as Items

import numpy as np

from jaxgen.engine.constraints import Constraint, ConstraintPool
from jaxgen.engine.continuation import Continuation
from jaxgen.engine.engine import InferenceEngine
from jaxgen.engine.outputs import FinishReason, RequestOutput, RequestTimes
from jaxgen.grammar.rules import RuleCompiler
from jaxgen.grammar.token_mask import MaskSource
from jaxgen.sampling import SamplingParams, SlotRow, slot_row
from jaxgen.schedule.request import Request
from jaxgen.schedule.scheduler import Scheduler
from jaxgen.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_FIRST_UID = 1 << 40  # far from the uids that callers of `put` choose


class Ledger:
    """Every request has its output here, and every continuation its scheduled request.

    To be read: continuations (by uid; those that have not ended), scheduler, rules, masks, scored
    (by uid: the outputs whose prompts are scored, and how many likeliest tokens of each position),
    and longest (tokens of the longest sequence: the context, or what the KV cache holds).
    """

    def __init__(
        self, engine: InferenceEngine, tokenizer: Tokenizer | None, eos_ids: Items[int]
    ) -> None:
        self._engine = engine
        self._vocab_size = int(engine.model.config.vocab_size)
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self.rules = RuleCompiler(tokenizer, self._vocab_size, eos_ids)
        self.scheduler = Scheduler(engine.limits, engine.state)
        self.longest = _longest(engine)
        self.masks = ConstraintPool()
        self.scored: dict[int, tuple[RequestOutput, int]] = {}
        self.continuations: dict[int, Continuation] = {}
        self._outputs: dict[str, RequestOutput] = {}
        self._changed: dict[str, RequestOutput] = {}
        self._ended: list[RequestOutput] = []
        self._uids = itertools.count(_FIRST_UID)
        self._seeds = np.random.default_rng(engine.config.seed)

    @property
    def unfinished(self) -> bool:
        """Whether any request still has tokens to come."""
        return bool(self._outputs)

    @property
    def load(self) -> tuple[int, int]:
        """(continuations that run, those that wait)."""
        waiting = self.scheduler.num_waiting
        # Another thread may ask while one is queued here and not yet there.
        return max(0, len(self.continuations) - waiting), waiting

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
        """As GenerationLoop.submit."""
        if request_id in self._outputs:
            raise ValueError(f"request {request_id} is in the engine already")
        params.validate(self._vocab_size)
        ids = self._engine.check_tokens(request_id, prompt_ids).tolist()
        if rules is None:
            rules = self.rules.compile(params)
        room = max(1, self.longest - len(ids))
        wanted = room if params.max_tokens is None else params.max_tokens
        output = RequestOutput(
            request_id, prompt, ids, [], max_tokens=wanted, times=RequestTimes(arrival)
        )
        seed = params.seed if params.seed is not None else int(self._seeds.integers(1 << 62))
        begun: list[Request] = []
        try:
            for index in range(params.n):
                request = Request(
                    next(self._uids),
                    ids,
                    max_tokens=wanted,
                    priority=priority,
                    arrival=arrival,
                    cache_salt=cache_salt,
                    reads_cache=params.prompt_logprobs is None or index > 0,
                )
                self.scheduler.submit(request)
                begun.append(request)
                self._begin(request, output, index, params, seed + index, rules)
            self.slot_row(begun[0])  # refuses now what admission would refuse in mid-step
        except (RuntimeError, ValueError):
            for request in begun:
                self.end(request)
            raise
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
            self.scored[begun[0].uid] = (output, params.prompt_logprobs)
        self._outputs[request_id] = output
        return output

    def _begin(
        self,
        request: Request,
        output: RequestOutput,
        index: int,
        params: SamplingParams,
        seed: int,
        rules: Items[MaskSource],
    ) -> None:
        own = [rule.copy() for rule in rules]
        constraint = Constraint(own, self._vocab_size) if own else None
        self.continuations[request.uid] = Continuation(
            request, output, index, params, seed, self._eos_ids, self._tokenizer, constraint
        )
        if constraint is not None:
            request.waits = True
            self.masks.compute(request.uid, constraint, None)

    def abort(self, request_id: str) -> None:
        """Ends a request at once; unknown ids are fine."""
        for continuation in list(self.continuations.values()):
            if continuation.output.request_id == request_id:
                continuation.finish(FinishReason.ABORT)
                self.end(continuation.request)
        self._outputs.pop(request_id, None)

    def end(self, request: Request) -> None:
        """Forgets a continuation that has ended, and frees what it holds."""
        self.scheduler.finish(request)
        self.masks.forget(request.uid)
        self.scored.pop(request.uid, None)
        continuation = self.continuations.pop(request.uid, None)
        if continuation is not None:
            continuation.output.times.preemptions += request.preemptions
            self._ended.append(continuation.output)

    def fail_all(self, reason: str) -> None:
        """Ends every request with an error."""
        for continuation in list(self.continuations.values()):
            continuation.fail(reason)
            self.end(continuation.request)
        self._outputs.clear()
        self._changed.clear()
        self._ended.clear()

    def touch(self, outputs: Items[RequestOutput]) -> None:
        """The outputs have changed: `take_changed` will tell of them."""
        self._changed.update([(output.request_id, output) for output in outputs])

    def take_changed(self) -> list[RequestOutput]:
        """The outputs that have changed since the last call; finished ones are forgotten."""
        changed, self._changed = self._changed, {}
        ended, self._ended = self._ended, []
        for output in ended:
            # Its id may have been given to another meanwhile, where it was aborted.
            if output.finished and self._outputs.get(output.request_id) is output:
                del self._outputs[output.request_id]
        return list(changed.values())

    def settle_masks(self) -> None:
        """Who sat out for its mask may go on, or ends by what its rules say."""
        for uid in self.masks.settled() if self.masks.waiting else ():
            continuation = self.continuations[uid]
            constraint = continuation.constraint
            assert constraint is not None
            continuation.request.waits = False
            if constraint.error is not None:
                continuation.fail(constraint.error, refused=constraint.refused)
            elif constraint.ended:
                continuation.finish(FinishReason.STOP)
            else:
                continue
            self.end(continuation.request)
            self.touch([continuation.output])

    def slot_row(self, request: Request) -> SlotRow:
        """What its slot in the sampler must hold, now that it has said what it has."""
        continuation = self.continuations[request.uid]
        return slot_row(
            continuation.params,
            vocab_size=self._vocab_size,
            seed=continuation.seed,
            eos_ids=() if continuation.params.ignore_eos else self._eos_ids,
            prompt_ids=request.prompt_ids,
            output_ids=request.output_ids,
        )


def _longest(engine: InferenceEngine) -> int:
    """Tokens of a sequence that the engine can bring to its end; its last one is never computed."""
    context = engine.state.max_context
    held = engine.capacity.max_sequence_tokens(engine.limits.max_tokens) + 1
    if held < context:
        logger.warning(
            "the KV cache holds a sequence of %d tokens, not of the context's %d: give it more "
            "memory, or lower max_model_len",
            held,
            context,
        )
    return min(held, context)
