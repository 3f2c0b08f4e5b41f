"""All six verdicts, their numbers and their order."""

import pytest

from jaxgen.ragged.capacity import Capacity
from jaxgen.ragged.sequence import CacheGroup
from jaxgen.ragged.state import StateManager
from jaxgen.schedule.limits import Limits
from jaxgen.schedule.request import Request
from jaxgen.schedule.scheduler import Scheduler
from jaxgen.schedule.verdict import SchedulingError, SchedulingResult as Result, can_schedule

LIMITS = Limits(max_tokens=16, max_sequences=3)


def manager(blocks=6):
    return StateManager([CacheGroup()], [blocks], block_size=4, max_context=20, max_tracked=4)


def test_the_numbers_are_deepspeeds():
    assert [(result.name, result.value) for result in Result] == [
        ("Success", 0),
        ("EngineSequenceLimitExceeded", 1),
        ("BatchSequenceLimitExceeded", 2),
        ("BatchTokenLimitExceeded", 3),
        ("KVCacheLimitExceeded", 4),
        ("SequenceTokenLimitExceeded", 5),
        ("QueueLimitExceeded", 6),  # ours
    ]
    error = SchedulingError(Result.KVCacheLimitExceeded, "It needs 3.")
    assert isinstance(error, RuntimeError)
    assert error.result is Result.KVCacheLimitExceeded
    assert str(error).endswith("more memory. It needs 3.")


@pytest.mark.parametrize(
    ("uids", "lengths", "result"),
    [
        ([], [], Result.Success),
        ([1, 9], [8, 3], Result.Success),
        ([1, 9, 10, 11], [99] * 4, Result.BatchSequenceLimitExceeded),
        ([9, 10], [99, 99], Result.EngineSequenceLimitExceeded),
        ([9], [21], Result.SequenceTokenLimitExceeded),
        ([1], [13], Result.SequenceTokenLimitExceeded),
        ([9], [17], Result.BatchTokenLimitExceeded),
        ([9], [13], Result.KVCacheLimitExceeded),
        ([1, 9], [1, 12], Result.KVCacheLimitExceeded),
    ],
)
def test_verdicts_in_order(uids, lengths, result):
    state = manager()
    for uid in (1, 2, 3):
        state.track(uid)
    state.reserve(1, 8)
    state.commit(1)
    state.reserve(2, 2)
    state.commit(2)
    assert can_schedule(Capacity(state), uids, lengths, LIMITS) is result
    state.check()


@pytest.mark.parametrize(
    ("uids", "lengths", "message"),
    [
        ([1], [], "1 uids and 0 lengths"),
        ([1, 1], [1, 1], "given twice"),
        ([1], [0], "at least 1 token"),
    ],
)
def test_senseless_questions_are_refused(uids, lengths, message):
    with pytest.raises(ValueError, match=message):
        can_schedule(Capacity(manager()), uids, lengths, LIMITS)


@pytest.mark.parametrize(
    ("limits", "blocks", "prompt", "max_tokens", "result"),
    [
        (LIMITS, 6, 20, 1, Result.SequenceTokenLimitExceeded),
        (LIMITS, 2, 8, 2, Result.KVCacheLimitExceeded),
        (Limits(8, 3, no_chunking=True), 6, 8, 2, Result.BatchTokenLimitExceeded),
    ],
)
def test_what_can_never_run_is_refused_at_once(limits, blocks, prompt, max_tokens, result):
    scheduler = Scheduler(limits, manager(blocks))
    with pytest.raises(SchedulingError) as refused:
        scheduler.submit(Request(1, [5] * prompt, max_tokens=max_tokens))
    assert refused.value.result is result
    assert scheduler.unfinished == 0
    scheduler.submit(Request(1, [5] * (prompt - 1), max_tokens=1))


def test_more_output_than_the_context_leaves_is_refused():
    scheduler = Scheduler(LIMITS, manager())
    with pytest.raises(SchedulingError, match="asks for 6 more; the context has 20") as error:
        scheduler.submit(Request(1, [5] * 15, max_tokens=6))
    assert error.value.result is Result.SequenceTokenLimitExceeded
    scheduler.submit(Request(1, [5] * 15, max_tokens=5))
    with pytest.raises(ValueError, match="Request 1 is in the engine already"):
        scheduler.submit(Request(1, [5], max_tokens=1))


def test_a_full_queue_refuses_until_somebody_left_it():
    scheduler = Scheduler(Limits(16, 1, max_waiting=2), manager())
    for uid in (1, 2):
        scheduler.submit(Request(uid, [5], max_tokens=2, arrival=uid))
    with pytest.raises(SchedulingError, match="2 requests wait") as error:
        scheduler.submit(Request(3, [5], max_tokens=2, arrival=3))
    assert error.value.result is Result.QueueLimitExceeded
    assert scheduler.unfinished == 2
    scheduler.dispatched(scheduler.begin_step())
    scheduler.submit(Request(3, [5], max_tokens=2, arrival=3))


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 1), ([1], 0)])
def test_senseless_requests_are_refused(prompt, max_tokens):
    with pytest.raises(ValueError, match="Request 1"):
        Request(1, prompt, max_tokens=max_tokens)
