"""The scheduler against a device made of dictionaries: nothing lost, nothing repeated, no livelock.

The device keeps what each page holds, so that a block freed too early, shared by mistake or mapped
wrongly is read back wrong. It runs some steps ahead of the host, as the real one does.
"""

import random
from collections import deque

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxgen.ragged.sequence import CacheGroup
from jaxgen.ragged.state import StateManager
from jaxgen.schedule.limits import Limits
from jaxgen.schedule.request import UNKNOWN_TOKEN, Request, Status
from jaxgen.schedule.scheduler import Scheduler
from jaxgen.schedule.verdict import SchedulingError

EOS = 0


def next_token(tokens):
    """A model: the next token follows from all that came before; one in thirty ends the text."""
    return random.Random(str(tokens)).randrange(30)


def truth(prompt, max_tokens):
    output = []
    while len(output) < max_tokens and EOS not in output:
        output.append(next_token(prompt + output))
    return output


class Device:
    """Pages per cache group, the sampler's last tokens, and a model that reads them back."""

    def __init__(self, state, limits):
        self.state, self.limits = state, limits
        self.pages = [{} for _ in state.groups]
        self.last = {}
        self.histories = {}

    def run(self, plan):
        """The sampled token of each chunk that emits; admission empties a slot."""
        for request in plan.admitted:
            self.last.pop(self.state[request.uid].slot, None)
        return [
            (chunk.request, token)
            for chunk in plan.chunks
            if (token := self._compute(chunk)) is not None
        ]

    def _compute(self, chunk):
        sequence = self.state[chunk.request.uid]
        assert (sequence.seen, sequence.in_flight) == (chunk.start, chunk.count)
        ids = [self.last[sequence.slot] if t == UNKNOWN_TOKEN else t for t in chunk.token_ids]
        history = self.histories.setdefault(chunk.request.uid, [])
        history[chunk.start :] = ids
        boundary = self.limits.recompute_at
        long = boundary is not None and sequence.anchor > boundary
        for group, pages in enumerate(self.pages):
            table = self.state.tables[group][sequence.index]
            for position in range(chunk.start, sequence.length):
                block, offset = divmod(position, self.state.block_size)
                assert table[block] < self.state.num_blocks[group]
                content = (chunk.request.uid, position, history[position], long)
                pages[int(table[block]), offset] = content
            window = self.state.groups[group].window or sequence.length
            for position in range(max(0, chunk.start - window + 1), sequence.length):
                block, offset = divmod(position, self.state.block_size)
                held = pages[int(table[block]), offset]
                assert held == (chunk.request.uid, position, history[position], long)
        if not chunk.emit:
            return None
        if boundary is not None:
            assert long == (sequence.length > boundary)
        else:
            assert sequence.anchor == len(chunk.request.prompt_ids)
        self.last[sequence.slot] = token = next_token(list(history))
        return token


class Simulation(RuleBasedStateMachine):
    """Random arrivals, ends and cancellations on tiny pools."""

    @initialize(
        windows=st.sampled_from([(None,), (None, 3), (5,), (2, None, 7)]),
        limits=st.builds(
            Limits,
            max_tokens=st.integers(6, 24),
            max_sequences=st.integers(1, 6),
            no_chunking=st.sampled_from([False, False, True]),
            recompute_at=st.sampled_from([None, None, 9]),
        ),
        block_size=st.sampled_from([1, 2, 4]),
        spare=st.integers(-8, 8),
        depth=st.integers(0, 3),
    )
    def build(self, windows, limits, block_size, spare, depth):
        self.depth = depth
        blocks = max(4, 32 // block_size + spare)
        self.limits = limits
        self.state = StateManager(
            [CacheGroup(window) for window in windows],
            [blocks] * len(windows),
            block_size=block_size,
            max_context=48,
            max_tracked=6,
            num_slots=self.limits.max_sequences,
        )
        self.scheduler = Scheduler(self.limits, self.state)
        self.device = Device(self.state, self.limits)
        self.unread = deque()
        self.requests = []
        self.cancelled = set()

    @rule(
        sizes=st.lists(
            st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 1)),
            min_size=1,
            max_size=4,
        )
    )
    def submit(self, sizes):
        for length, max_tokens, priority in sizes:
            self.submit_one(length, max_tokens, priority)

    def submit_one(self, length, max_tokens, priority):
        uid = len(self.requests) + len(self.cancelled) + 1000
        prompt = [uid * 100 + i for i in range(length)]
        request = Request(
            uid, prompt, max_tokens=max_tokens, priority=priority, arrival=len(self.requests)
        )
        try:
            self.scheduler.submit(request)
        except SchedulingError:
            self.cancelled.add(uid)
        else:
            self.requests.append(request)

    @precondition(lambda self: self.unread)
    @rule()
    def read(self):
        for request, token in self.unread.popleft():
            self.scheduler.receive(request, token, stop=token == EOS)

    @rule(times=st.integers(1, 6))
    def steps(self, times):
        for _ in range(times):
            self.advance()

    def advance(self):
        if len(self.unread) > self.depth:
            self.read()
        plan = self.scheduler.begin_step()
        assert sum(chunk.count for chunk in plan.chunks) <= self.limits.max_tokens
        assert len(plan.chunks) <= self.limits.max_sequences
        uids = [chunk.request.uid for chunk in plan.chunks]
        assert len(set(uids)) == len(uids)
        if self.scheduler.running:
            first = min(self.scheduler.running, key=lambda request: request.rank)
            assert first.uid in uids, "the oldest running request does not go on"
        for chunk in plan.chunks:
            if self.limits.no_chunking:
                assert chunk.emit
                assert chunk.start == 0 or chunk.count == 1
        self.unread.append(self.device.run(plan))
        self.scheduler.dispatched(plan)
        return plan

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99))
    def cancel(self, which):
        request = self.requests[which % len(self.requests)]
        if request.status is not Status.FINISHED:
            self.cancelled.add(request.uid)
        self.scheduler.finish(request)
        assert request.uid not in self.state

    @rule()
    def abandon(self):
        before = [(request.uid, request.computed) for request in self.scheduler.running]
        plan = self.scheduler.begin_step()
        self.scheduler.abandon(plan)
        after = dict((request.uid, request.computed) for request in self.scheduler.running)
        kept = [uid for uid, _ in before if uid not in {r.uid for r in plan.preempted}]
        assert after == {uid: computed for uid, computed in before if uid in kept}

    @invariant()
    def state_is_consistent(self):
        if hasattr(self, "state"):
            self.state.check()

    def teardown(self):
        if not hasattr(self, "state"):
            return
        for _ in range(3000):
            if not self.scheduler.unfinished:
                break
            unread = any(self.unread)
            plan = self.advance()
            assert plan.chunks or plan.preempted or unread, "nothing goes on"
        assert not self.scheduler.unfinished
        assert self.state.free_blocks == self.state.num_blocks
        assert self.state.free_slots == self.state.num_slots
        for request in self.requests:
            expected = truth(request.prompt_ids, request.max_tokens)
            if request.uid in self.cancelled:
                assert request.output_ids == expected[: len(request.output_ids)]
            else:
                assert request.output_ids == expected


@pytest.mark.timeout(300)
def test_simulation():
    run_state_machine_as_test(
        Simulation,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
