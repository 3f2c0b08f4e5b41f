"""The scheduler against a device made of dictionaries: nothing lost, nothing repeated, no livelock.

The device keeps what each page holds, so that a block freed too early, shared by mistake or mapped
wrongly is read back wrong. It runs some steps ahead of the host, as the real one does.
"""

import random
from collections import deque
from dataclasses import replace

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

from jaxgen.ragged.prefix_cache import PrefixCache
from jaxgen.ragged.sequence import CacheGroup
from jaxgen.ragged.state import StateManager
from jaxgen.schedule.limits import Limits
from jaxgen.schedule.request import UNKNOWN_TOKEN, Request, Status
from jaxgen.schedule.scheduler import Scheduler
from jaxgen.schedule.verdict import SchedulingError, SchedulingResult

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
    """Pages per cache group, the sampler's last tokens, and a model that reads them back.

    A page holds what keys follow from: all tokens up to its position, the length that the model
    looks at, the salt (nothing may cross it), and the weights of the time.
    """

    def __init__(self, state, limits, key_length):
        self.state, self.limits, self.key_length = state, limits, key_length
        self.pages = [{} for _ in state.groups]
        self.last = {}
        self.histories = {}
        self.weights = 0

    def run(self, plan):
        """The sampled token of each chunk that emits; admission empties a slot."""
        for request in plan.admitted:
            self.last.pop(self.state[request.uid].slot, None)
            (start,) = [chunk.start for chunk in plan.chunks if chunk.request is request]
            tokens = request.token_ids(0, start)
            self.histories[request.uid] = [(token, self.weights) for token in tokens]
        return [
            (chunk.request, token)
            for chunk in plan.chunks
            if (token := self._compute(chunk)) is not None
        ]

    def _compute(self, chunk):
        request, sequence = chunk.request, self.state[chunk.request.uid]
        assert (sequence.seen, sequence.in_flight) == (chunk.start, chunk.count)
        ids = [self.last[sequence.slot] if t == UNKNOWN_TOKEN else t for t in chunk.token_ids]
        history = self.histories[request.uid]
        history[chunk.start :] = [(token, self.weights) for token in ids]
        tokens = tuple(token for token, _ in history)

        def content(position):
            length = self.key_length(max(sequence.anchor, position + 1))
            weights = history[position][1]
            return tokens[: position + 1], length, request.cache_salt, weights

        for group, pages in enumerate(self.pages):
            table = self.state.tables[group][sequence.index]
            for position in range(chunk.start, sequence.length):
                block, offset = divmod(position, self.state.block_size)
                assert self.state.allocators[group].counts[table[block]] == 1, "written, but shared"
                pages[int(table[block]), offset] = content(position)
            window = self.state.groups[group].window or sequence.length
            for position in range(max(0, chunk.start - window + 1), sequence.length):
                block, offset = divmod(position, self.state.block_size)
                assert table[block] < self.state.num_blocks[group]
                assert pages[int(table[block]), offset] == content(position)
        if not chunk.emit:
            return None
        if self.limits.recompute_at is not None:
            long = sequence.anchor > self.limits.recompute_at
            assert long == (sequence.length > self.limits.recompute_at)
        else:
            assert sequence.anchor == len(request.prompt_ids)
        self.last[sequence.slot] = token = next_token(list(tokens))
        return token


# What keys follow from beside their position, and its classes for the prefix cache.
LENGTHS = {
    "none": (lambda length: 0, lambda prompt: 0),
    "dynamic": (lambda length: max(length, 6), lambda prompt: max(prompt, 6)),
    "longrope": (lambda length: length > 9, lambda prompt: int(prompt > 9)),
}


class Simulation(RuleBasedStateMachine):
    """Random arrivals, ends, cancellations and resets on tiny pools, with common beginnings."""

    @initialize(
        windows=st.sampled_from([(None,), (None, 3), (5,), (2, None, 7)]),
        limits=st.builds(
            Limits,
            max_tokens=st.integers(6, 24),
            max_sequences=st.integers(1, 6),
            no_chunking=st.sampled_from([False, False, True]),
            max_waiting=st.sampled_from([None, None, 3]),
            sizes=st.sampled_from([(), (3, 5, 9, 17), (4, 24)]),
        ),
        lengths=st.sampled_from(["none", "none", "dynamic", "longrope"]),
        cached=st.sampled_from([True, True, True, False]),
        block_size=st.sampled_from([1, 2, 4]),
        spare=st.integers(-8, 8),
        depth=st.integers(0, 3),
    )
    def build(self, windows, limits, lengths, cached, block_size, spare, depth):
        self.depth = depth
        blocks = max(4, 32 // block_size + spare)
        self.limits = replace(limits, recompute_at=9 if lengths == "longrope" else None)
        key_length, length_class = LENGTHS[lengths]
        groups = [CacheGroup(window) for window in windows]
        cache = PrefixCache(groups, block_size, length_class=length_class)
        self.state = StateManager(
            groups,
            [blocks] * len(windows),
            prefix_cache=cache if cached else None,
            block_size=block_size,
            max_context=48,
            max_tracked=6,
            num_slots=self.limits.max_sequences,
        )
        self.scheduler = Scheduler(self.limits, self.state)
        self.device = Device(self.state, self.limits, key_length)
        self.unread = deque()
        self.requests = []
        self.cancelled = set()

    @rule(
        asked=st.lists(
            st.tuples(
                st.integers(1, 20),  # tokens of the prompt
                st.integers(0, 20),  # of them, those that all of its kind begin with
                st.integers(1, 20),  # max_tokens
                st.integers(0, 1),  # priority
                st.sampled_from([None, None, "salt"]),
                st.sampled_from([True, True, True, False]),  # reads_cache
            ),
            min_size=1,
            max_size=4,
        )
    )
    def submit(self, asked):
        for request in asked:
            self.submit_one(*request)

    def submit_one(self, length, common, max_tokens, priority, salt, reads_cache):
        uid = len(self.requests) + len(self.cancelled) + 1000
        prompt = [i if i < common else uid * 100 + i for i in range(1, length + 1)]
        request = Request(
            uid,
            prompt,
            max_tokens=max_tokens,
            priority=priority,
            arrival=len(self.requests),
            cache_salt=salt,
            reads_cache=reads_cache,
        )
        most = self.limits.max_waiting  # preempted requests may wait beyond it
        full = most is not None and len(self.scheduler.waiting) >= most
        try:
            self.scheduler.submit(request)
        except SchedulingError as error:
            self.cancelled.add(uid)
            refused = error.result
        else:
            self.requests.append(request)
            refused = None
        assert bool(refused) if full else refused is not SchedulingResult.QueueLimitExceeded

    @rule()
    def new_weights(self):
        self.state.reset_prefix_cache()
        self.device.weights += 1

    @precondition(lambda self: self.unread)
    @rule()
    def read(self):
        for request, token in self.unread.popleft():
            self.scheduler.receive(request, token, stop=token == EOS)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99), waits=st.booleans())
    def hold(self, which, waits):
        self.requests[which % len(self.requests)].waits = waits

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
            assert first.waits or first.uid in uids, "the oldest running request does not go on"
        for chunk in plan.chunks:
            assert not chunk.request.waits
            if self.limits.no_chunking:
                assert chunk.emit
                assert chunk.start == 0 or chunk.count == 1
        for request in plan.admitted:
            assert request.reads_cache or request.computed == 0
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
        for request in self.requests:
            request.waits = False
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
