"""One continuation while it grows: its tokens, text and log-probabilities, and what ends it."""

from collections.abc import Sequence as Items

from jaxgen.engine.constraints import FORBIDS_ALL, Constraint
from jaxgen.engine.outputs import CompletionOutput, FinishReason, RequestOutput, TokenLogprob
from jaxgen.grammar.token_mask import ids_of
from jaxgen.sampling import Sampled, SamplingParams, demand_of
from jaxgen.schedule.request import Request
from jaxgen.text.detokenize import IncrementalDetokenizer
from jaxgen.text.tokenizer import Tokenizer


class Continuation:
    """Ties a scheduled request to the output that its caller sees."""

    def __init__(
        self,
        request: Request,
        output: RequestOutput,
        index: int,
        params: SamplingParams,
        seed: int,
        eos_ids: Items[int],
        tokenizer: Tokenizer | None,
        constraint: Constraint | None = None,
    ) -> None:
        """constraint: what it may say; None for anything."""
        self.constraint = constraint
        self.request = request
        self.output = output
        self.params = params
        self.seed = seed
        self.demand = demand_of(params)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._end_ids = self._stop_ids.union(() if params.ignore_eos else eos_ids)
        self._min_tokens = params.min_tokens
        self._completion = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        self._ids = self._completion.token_ids
        output.outputs.append(self._completion)
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                stop=params.stop,
                min_tokens=params.min_tokens,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                continues_text=True,
            )
            self._completion.pieces = self._detokenizer.pieces

    def scheduled(self, now: float) -> None:
        """Its first step, or the first since it was preempted, is dispatched."""
        times, request = self.output.times, self.request
        if times.first_scheduled is None:
            times.first_scheduled = now
            self.output.cached_tokens = request.cached_tokens or 0

    def receive(self, token: int, sampled: Sampled, row: int) -> bool:
        """Takes the next token; whether it ends the continuation by its content.

        sampled: on the host; the token's log-probabilities are in its `row`.
        """
        completion, detokenizer = self._completion, self._detokenizer
        self._ids.append(token)
        if completion.logprobs is not None:
            completion.logprobs.append(self._logprob(token, sampled, row))
        if token in self._end_ids and len(self._ids) > self._min_tokens:
            completion.stop_reason = token if token in self._stop_ids else None
            if detokenizer is not None and self.params.include_stop_str_in_output:
                detokenizer.push(token)  # otherwise the id that ends it is no text
            self._close(FinishReason.STOP)
            return True
        if detokenizer is None:
            return False
        detokenizer.push(token)
        if detokenizer.stop is None:
            return False
        completion.stop_reason = detokenizer.stop
        self._close(FinishReason.STOP)
        return True

    def finish(self, reason: FinishReason) -> None:
        """Ends it for a reason other than its content; nothing happens if it has ended."""
        if self._completion.finish_reason is None:
            self._close(reason)

    def fail(self, error: str, *, refused: bool = False) -> None:
        """Ends it with an error. refused: one of the request itself."""
        self._completion.error, self._completion.refused = error, refused
        self.finish(FinishReason.ERROR)

    def fail_to_draw(self) -> bool:
        """Ends it, since no token could be drawn. Whether that was for the model's logits, and
        not because it may say nothing.
        """
        refused = self._may_say_nothing()
        self.fail(FORBIDS_ALL if refused else "the model's logits are not finite", refused=refused)
        return not refused

    def _may_say_nothing(self) -> bool:
        if self.constraint is None:  # lists without rules are checked when they are submitted
            return False
        allowed = ids_of(self.constraint.mask)
        if self.params.allowed_token_ids is not None:
            allowed &= set(self.params.allowed_token_ids)
        if len(self._ids) < self._min_tokens:
            allowed -= self._end_ids
        return not allowed

    def _close(self, reason: FinishReason) -> None:
        if self._detokenizer is not None:
            self._detokenizer.finish()
        self._completion.finish_reason = reason

    def _logprob(self, token: int, sampled: Sampled, row: int) -> TokenLogprob:
        count = self.params.logprobs or 0
        ids, values = sampled.top_ids[row, :count], sampled.top_logprobs[row, :count]
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprob(token, float(sampled.logprobs[row]), top)
