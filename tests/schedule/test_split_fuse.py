"""The policy of one step: decodes first, fair shares of the rest, admission and preemption."""

import pytest

from jaxgen.ragged.sequence import CacheGroup
from jaxgen.ragged.state import StateManager
from jaxgen.schedule.limits import Limits
from jaxgen.schedule.request import UNKNOWN_TOKEN, Request, Status
from jaxgen.schedule.scheduler import Scheduler
from jaxgen.schedule.split_fuse import MAX_BYPASSED, plan


def scheduler(max_tokens=16, max_sequences=8, blocks=64, windows=(None,), **limits):
    state = StateManager(
        [CacheGroup(window) for window in windows],
        [blocks] * len(windows),
        block_size=4,
        max_context=200,
        max_tracked=16,
        num_slots=max_sequences,
    )
    return Scheduler(Limits(max_tokens, max_sequences, **limits), state)


def submit(host, uid, prompt, max_tokens=8, priority=0):
    request = Request(
        uid, range(1, prompt + 1), max_tokens=max_tokens, priority=priority, arrival=uid
    )
    host.submit(request)
    return request


def run(host):
    """One step, read at once: {uid: tokens computed}."""
    step = host.begin_step()
    host.dispatched(step)
    for chunk in step.chunks:
        if chunk.emit:
            host.receive(chunk.request, 7)
    host.state.check()
    return {chunk.request.uid: chunk.count for chunk in step.chunks}


def test_limits_leave_every_decode_its_token():
    with pytest.raises(ValueError, match="1 <= max_sequences <= max_tokens, got 5 and 4"):
        Limits(4, 5)


def test_decodes_come_first_and_a_prompt_fills_the_budget():
    host = scheduler()
    submit(host, 1, 3)
    submit(host, 2, 5)
    assert run(host) == {1: 3, 2: 5}
    submit(host, 3, 40)
    assert list(run(host).items()) == [(1, 1), (2, 1), (3, 14)]
    assert run(host) == {1: 1, 2: 1, 3: 14}
    assert run(host) == {1: 1, 2: 1, 3: 12}
    assert run(host) == {1: 1, 2: 1, 3: 1}


def test_short_prompts_do_not_wait_behind_a_long_one():
    host = scheduler()
    submit(host, 1, 100)
    submit(host, 2, 6)
    submit(host, 3, 3)
    assert run(host) == {1: 8, 2: 6, 3: 2}
    assert run(host) == {2: 1, 1: 14, 3: 1}


def test_nor_behind_a_second_long_one():
    host = scheduler()
    submit(host, 1, 100)
    submit(host, 2, 90)
    submit(host, 3, 3)
    assert run(host) == {1: 8, 3: 3, 2: 5}


def test_prompts_of_like_lengths_are_served_as_they_came():
    """Shortest first, each would stay for longer beside the prompts of the others."""
    host = scheduler(max_sequences=16)
    for uid, length in enumerate((7, 8, 6, 5, 4, 3), start=1):
        submit(host, uid, length)
    assert run(host) == {1: 7, 2: 8, 3: 1}
    assert run(host) == {1: 1, 2: 1, 3: 5, 4: 5, 5: 4}
    assert run(host) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 3}


def test_a_step_ends_at_a_compiled_size_where_others_are_held_back():
    """Two may run. What would be padded to 16 is cut to 8; the rest is not lost."""
    host = scheduler(max_sequences=2, sizes=(8, 16))
    submit(host, 1, 3)
    submit(host, 2, 8)
    submit(host, 3, 5)
    assert run(host) == {1: 3, 2: 5}
    assert run(host) == {1: 1, 2: 3}
    assert run(host) == {1: 1, 2: 1}


def test_a_cut_leaves_a_quarter_of_what_is_wanted():
    """Or prompts would go on in single tokens, step after step."""
    host = scheduler(max_sequences=3, sizes=(3, 4, 16))
    for uid in (1, 2):
        submit(host, uid, 3)
        run(host)
    submit(host, 3, 10, max_tokens=4)
    submit(host, 4, 5)
    assert run(host) == {1: 1, 2: 1, 3: 2}  # 1 of 10 would be too little
    assert run(host) == {1: 1, 2: 1, 3: 2}
    submit(host, 5, 5)
    assert run(host) == {1: 1, 2: 1, 3: 2}


@pytest.mark.parametrize(
    ("waiting", "options"),
    [
        ((), {}),  # nobody is held back: an answer must not begin later than it can
        ((5,), {"no_chunking": True}),
        ((5,), {"sizes": (2, 16)}),  # as large as the decodes, or larger than what there is
        ((5,), {"sizes": ()}),
    ],
)
def test_and_otherwise_it_takes_what_there_is(waiting, options):
    host = scheduler(max_sequences=3, **{"sizes": (8, 16), **options})
    for uid in (1, 2):
        submit(host, uid, 3)
        run(host)
    submit(host, 3, 10, max_tokens=4)
    for uid, prompt in enumerate(waiting, start=4):
        submit(host, uid, prompt)
    assert run(host) == {1: 1, 2: 1, 3: 10}


def test_who_waits_for_something_else_is_not_held_back():
    host = scheduler(max_sequences=2, sizes=(8, 16))
    submit(host, 1, 3)
    submit(host, 2, 8)
    submit(host, 3, 5).waits = True
    assert run(host) == {1: 3, 2: 8}


def test_the_oldest_prompt_always_goes_on():
    host = scheduler(max_sequences=16)
    submit(host, 1, 100)
    for uid in range(2, 14):
        submit(host, uid, 16, max_tokens=1)
        assert run(host)[1] == 8


def test_priorities_come_before_age():
    host = scheduler()
    submit(host, 1, 100, priority=1)
    submit(host, 2, 14, priority=0)
    assert run(host) == {2: 14, 1: 2}


def test_a_plan_changes_nothing():
    host = scheduler()
    submit(host, 1, 30)
    before = [repr(request) for request in host.waiting]
    first = plan(host.waiting, host.running, host.limits, host.capacity)
    assert plan(host.waiting, host.running, host.limits, host.capacity) == first
    assert [repr(request) for request in host.waiting] == before
    assert host.state.free_blocks == host.state.num_blocks


def test_admission_asks_for_the_blocks_of_the_whole_prompt():
    host = scheduler(blocks=10)
    submit(host, 1, 30, max_tokens=2)
    submit(host, 2, 9, max_tokens=1)
    submit(host, 3, 4, max_tokens=1)
    assert run(host) == {1: 12, 3: 4}
    assert 2 not in host.state


def test_a_window_asks_for_no_more_than_it_holds():
    host = scheduler(blocks=7, windows=(6,))
    submit(host, 1, 150, max_tokens=2)
    assert run(host) == {1: 16}


def test_who_lacks_blocks_is_passed_by_a_bounded_number_of_times():
    host = scheduler(blocks=20, max_sequences=4)
    submit(host, 1, 40, max_tokens=40)
    while run(host)[1] > 1:
        pass
    large = submit(host, 2, 60, max_tokens=2)
    for uid in range(3, 3 + MAX_BYPASSED):
        assert submit(host, uid, 2, max_tokens=1) in host.waiting
        assert run(host) == {1: 1, uid: 2}
    assert large.bypassed == MAX_BYPASSED
    small = submit(host, 50, 2, max_tokens=1)
    assert run(host) == {1: 1}
    while host.unfinished:
        run(host)
    assert large.status is small.status is Status.FINISHED


def test_preemption_takes_the_latest_of_the_least_important_and_keeps_its_output():
    host = scheduler(blocks=6, max_sequences=3)
    first = submit(host, 1, 7, max_tokens=16)
    second = submit(host, 2, 3, max_tokens=12, priority=1)
    third = submit(host, 3, 3, max_tokens=12)
    preempted = []
    while host.unfinished:
        before = {request.uid: list(request.output_ids) for request in (first, second, third)}
        step = host.begin_step()
        preempted += [request.uid for request in step.preempted]
        assert all(before[request.uid] == request.output_ids for request in step.preempted)
        host.dispatched(step)
        for chunk in step.chunks:
            if chunk.emit:
                host.receive(chunk.request, len(chunk.request.output_ids))
    assert preempted[0] == 2
    assert 1 not in preempted
    for request in (first, second, third):
        assert request.output_ids == list(range(request.max_tokens))
        assert len(request.prompt_ids) == {1: 7, 2: 3, 3: 3}[request.uid]


def test_the_device_runs_ahead_and_a_late_token_is_dropped():
    host = scheduler()
    request = submit(host, 1, 3, max_tokens=3)
    steps = []
    for _ in range(3):
        steps.append(host.begin_step())
        host.dispatched(steps[-1])
    assert [chunk.token_ids for step in steps for chunk in step.chunks] == [
        [1, 2, 3],
        [UNKNOWN_TOKEN],
        [UNKNOWN_TOKEN],
    ]
    assert request.status is Status.ENDING
    assert host.state.free_blocks == host.state.num_blocks
    assert not host.begin_step().chunks
    assert host.receive(request, 50)
    assert host.receive(request, 51, stop=True)
    assert not host.receive(request, 52)
    assert request.output_ids == [50, 51]
    assert host.unfinished == 0


def test_a_sequence_is_computed_anew_once_when_it_outgrows_the_boundary():
    host = scheduler(recompute_at=6)
    submit(host, 1, 4, max_tokens=8)
    seen = []
    while host.unfinished:
        step = host.begin_step()
        anchor = host.state[1].anchor if 1 in host.state else 0
        host.dispatched(step)
        for chunk in step.chunks:
            seen.append((chunk.start, chunk.count, anchor))
            host.receive(chunk.request, 7)
    assert seen == [
        (0, 4, 4),
        (4, 1, 4),
        (5, 1, 4),
        (0, 7, 7),
        *[(start, 1, 7) for start in range(7, 11)],
    ]


def test_prompts_that_must_not_be_split_are_whole():
    host = scheduler(no_chunking=True)
    submit(host, 1, 9)
    submit(host, 2, 9)
    submit(host, 3, 4)
    assert run(host) == {1: 9, 3: 4}
    assert run(host) == {1: 1, 3: 1, 2: 9}
