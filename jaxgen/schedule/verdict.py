"""Whether a batch, or a request, can be served: one enum, never a bare no."""

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they bring numpy, which the command line's help can do without
    from jaxgen.schedule.limits import Capacity, Limits
    from jaxgen.schedule.request import Request


class SchedulingResult(Enum):
    """The answer to "can this be scheduled"; the names and numbers up to 5 are DeepSpeed's."""

    Success = 0
    """Everything fits."""
    EngineSequenceLimitExceeded = 1
    """More sequences than the engine tracks (max_tracked_sequences)."""
    BatchSequenceLimitExceeded = 2
    """More sequences than one step takes (max_num_seqs)."""
    BatchTokenLimitExceeded = 3
    """More tokens than one step takes (max_num_batched_tokens)."""
    KVCacheLimitExceeded = 4
    """Not enough KV blocks."""
    SequenceTokenLimitExceeded = 5
    """A sequence longer than the context (max_model_len)."""
    QueueLimitExceeded = 6
    """As many requests wait as may (max_num_queued_reqs)."""


_SENTENCES = {
    SchedulingResult.Success: "The batch can be scheduled.",
    SchedulingResult.EngineSequenceLimitExceeded: (
        "The engine tracks as many sequences as it may: flush some, or raise max_tracked_sequences."
    ),
    SchedulingResult.BatchSequenceLimitExceeded: (
        "The batch has more sequences than a step takes: split it, or raise max_num_seqs."
    ),
    SchedulingResult.BatchTokenLimitExceeded: (
        "The batch has more tokens than a step takes: split it, or raise max_num_batched_tokens."
    ),
    SchedulingResult.KVCacheLimitExceeded: (
        "There are not enough KV blocks: flush sequences, ask for fewer tokens, or give the KV "
        "cache more memory."
    ),
    SchedulingResult.SequenceTokenLimitExceeded: (
        "A sequence would be longer than the context: shorten it, or raise max_model_len."
    ),
    SchedulingResult.QueueLimitExceeded: (
        "As many requests wait as may: try again later, or raise max_num_queued_reqs."
    ),
}


class SchedulingError(RuntimeError):
    """Something that cannot be scheduled was asked for; `result` says why."""

    def __init__(self, result: SchedulingResult, detail: str = "") -> None:
        """detail: the numbers of the case, as a sentence."""
        super().__init__(" ".join(part for part in (_SENTENCES[result], detail) if part))
        self.result = result


def can_schedule(
    capacity: "Capacity", uids: Sequence[int], lengths: Sequence[int], limits: "Limits"
) -> SchedulingResult:
    """Whether one step can add lengths[i] tokens to each sequence uids[i]; new uids are begun.

    The first that is violated is told, in this order: sequences per step, tracked sequences, length
    of each sequence, tokens per step, KV blocks.
    ValueError for unequal lengths, a uid given twice, or less than one token.
    """
    if len(uids) != len(lengths):
        raise ValueError(f"{len(uids)} uids and {len(lengths)} lengths: give one length per uid.")
    if len(set(uids)) != len(uids):
        raise ValueError(f"A uid is given twice: {list(uids)}.")
    if any(length < 1 for length in lengths):
        raise ValueError(f"Each sequence needs at least 1 token, got {list(lengths)}.")
    if len(uids) > limits.max_sequences:
        return SchedulingResult.BatchSequenceLimitExceeded
    if sum(not capacity.tracked(uid) for uid in uids) > capacity.free_sequences:
        return SchedulingResult.EngineSequenceLimitExceeded
    asked = list(zip(uids, lengths, strict=True))
    if any(capacity.length(uid) + length > capacity.max_context for uid, length in asked):
        return SchedulingResult.SequenceTokenLimitExceeded
    if sum(lengths) > limits.max_tokens:
        return SchedulingResult.BatchTokenLimitExceeded
    needed = sum(capacity.blocks_needed(uid, length) for uid, length in asked)
    if needed > min(capacity.free_blocks):
        return SchedulingResult.KVCacheLimitExceeded
    return SchedulingResult.Success


def can_ever_run(request: "Request", limits: "Limits", capacity: "Capacity") -> SchedulingResult:
    """Whether the engine could serve the request to its last token if it had nothing else to do.

    Its length is prompt plus max_tokens; the last token is never computed. A model without chunking
    must be able to compute all of it in one step, since preemption may ask for that.
    """
    longest = len(request.prompt_ids) + request.max_tokens
    if longest > capacity.max_context:
        return SchedulingResult.SequenceTokenLimitExceeded
    if limits.no_chunking and longest - 1 > limits.max_tokens:
        return SchedulingResult.BatchTokenLimitExceeded
    peaks = capacity.peak_blocks(longest - 1, limits.max_tokens)
    if any(peak > total for peak, total in zip(peaks, capacity.num_blocks, strict=True)):
        return SchedulingResult.KVCacheLimitExceeded
    return SchedulingResult.Success
