"""The state manager: all or nothing across groups, windows give blocks back, nothing leaks."""

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxgen.ragged.allocator import OutOfBlocks
from jaxgen.ragged.capacity import Capacity
from jaxgen.ragged.sequence import CacheGroup
from jaxgen.ragged.state import ContextOverflow, StateManager, TooManySequences


def manager(windows=(None,), blocks=(8,), **changes):
    sizes = {"block_size": 4, "max_context": 24, "max_tracked": 3, "num_slots": 2} | changes
    return StateManager([CacheGroup(window) for window in windows], blocks, **sizes)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="1 cache groups got 2 numbers of blocks"):
        manager(blocks=(8, 8))
    with pytest.raises(ValueError, match="must be at least 1"):
        manager(max_tracked=0)
    with pytest.raises(ValueError, match="window must be at least 1"):
        CacheGroup(0)


def test_a_step_is_a_transaction():
    state = manager()
    sequence = state.track(7)
    state.reserve(7, 5)
    assert (sequence.seen, sequence.in_flight, state.free_blocks) == (0, 5, (6,))
    state.commit(7)
    state.reserve(7, 4)
    assert state.free_blocks == (5,)
    state.rollback(7, 1)
    assert (sequence.length, state.free_blocks) == (8, (6,))
    state.rollback(7)
    assert (sequence.seen, sequence.in_flight, state.free_blocks) == (5, 0, (6,))
    with pytest.raises(ValueError, match="cannot take back 1 tokens"):
        state.rollback(7, 1)
    assert state.flush(7)
    assert not state.flush(7)
    assert state.free_blocks == (8,)


def test_what_does_not_fit_changes_nothing():
    state = manager(windows=(None, 6), blocks=(8, 3))
    state.track(1)
    with pytest.raises(
        OutOfBlocks, match="4 more blocks are needed, 3 of 3 are free in cache group 1"
    ):
        state.reserve(1, 16)
    with pytest.raises(ContextOverflow, match="25 more tokens exceed the context of 24"):
        state.reserve(1, 25)
    with pytest.raises(ValueError, match="at least 1 token"):
        state.reserve(1, 0)
    with pytest.raises(KeyError):
        state.reserve(2, 1)
    assert state.free_blocks == (8, 3)
    state.check()


def test_slots_and_tracking_are_limited():
    state = manager()
    first = state.track(1, sampled=True)
    state.track(2, sampled=True)
    with pytest.raises(TooManySequences, match="All 2 sampler slots"):
        state.track(3, sampled=True)
    assert state.track(3).slot == state.num_slots
    with pytest.raises(TooManySequences, match="All 3 sequences"):
        state.track(4)
    with pytest.raises(ValueError, match="tracked already"):
        state.track(1)
    state.flush(1)
    assert state.track(5, sampled=True).slot == first.slot


def test_a_window_lets_a_long_sequence_live_in_a_small_pool():
    state = manager(windows=(6,), blocks=(3,), max_context=400)
    state.track(1)
    for _ in range(100):
        state.reserve(1, 4)
        state.commit(1)
        state.check()
    assert state.free_blocks == (1,)
    assert Capacity(state).max_sequence_tokens(step_tokens=4) == 400
    assert Capacity(state).max_sequence_tokens(step_tokens=8) == 12


def test_query_counts_tokens_and_blocks():
    state = manager(blocks=(80,), block_size=64, max_context=4096)
    capacity = Capacity(state)
    assert capacity.query(1, 100, 1) == (64, 1)
    assert capacity.query(1, 100, 2) == (100, 2)
    assert capacity.query(1, 0, 2) == (0, 0)
    state.track(1)
    state.reserve(1, 4000)
    state.commit(1)
    assert capacity.query(1, 128, 10) == (96, 1)
    assert capacity.query(1, 128, 0) == (32, 0)
    assert capacity.remaining_block_capacity(1) == 32
    assert capacity.remaining_block_capacity(2) == 0
    state.track(2)
    state.track(3)
    assert capacity.query(4, 1, 1) == (0, 0)
    with pytest.raises(ValueError, match="must not be negative"):
        capacity.query(1, -1, 1)


class States(RuleBasedStateMachine):
    """Random steps on tiny pools with windows, against plain counts."""

    @initialize(
        windows=st.sampled_from([(None,), (3,), (None, 1), (4, None, 9)]),
        block_size=st.integers(1, 4),
        blocks=st.lists(st.integers(1, 14), min_size=3, max_size=3),
    )
    def build(self, windows, block_size, blocks):
        self.state = manager(windows, blocks[: len(windows)], block_size=block_size)
        self.capacity = Capacity(self.state)
        self.model = {}

    @rule(uid=st.integers(0, 4), sampled=st.booleans())
    def track(self, uid, sampled):
        slots = sum(sampled for _, _, sampled in self.model.values())
        if uid in self.model:
            with pytest.raises(ValueError, match="tracked already"):
                self.state.track(uid)
        elif len(self.model) == 3 or (sampled and slots == 2):
            with pytest.raises(TooManySequences):
                self.state.track(uid, sampled=sampled)
        else:
            self.state.track(uid, sampled=sampled)
            self.model[uid] = (0, 0, sampled)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tokens=st.integers(1, 12))
    def reserve(self, data, tokens):
        uid = data.draw(st.sampled_from(sorted(self.model)))
        seen, flying, sampled = self.model[uid]
        fits = self.capacity.blocks_needed(uid, tokens) <= min(self.state.free_blocks)
        fitting = self.capacity.fitting_tokens(uid, tokens, min(self.state.free_blocks))
        assert (fitting == tokens) == (fits and seen + flying + tokens <= 24)
        if seen + flying + tokens > 24:
            with pytest.raises(ContextOverflow):
                self.state.reserve(uid, tokens)
        elif not fits:
            free = self.state.free_blocks
            with pytest.raises(OutOfBlocks):
                self.state.reserve(uid, tokens)
            assert self.state.free_blocks == free
        else:
            self.state.reserve(uid, tokens)
            self.model[uid] = (seen, flying + tokens, sampled)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), back=st.integers(0, 12))
    def commit(self, data, back):
        uid = data.draw(st.sampled_from(sorted(self.model)))
        seen, flying, sampled = self.model[uid]
        back = min(back, flying)
        self.state.rollback(uid, back)
        self.state.commit(uid)
        self.model[uid] = (seen + flying - back, 0, sampled)
        for group, cache in enumerate(self.state.groups):
            table = self.state.tables[group][self.state[uid].index]
            total = self.state.num_blocks[group]
            oldest = 0 if cache.window is None else max(0, self.state[uid].seen - cache.window + 1)
            owned = {block for block in range(self.state.max_blocks) if table[block] < total}
            size = self.state.block_size
            assert owned == {
                position // size for position in range(oldest // size * size, self.state[uid].seen)
            } - set(range(oldest // size))

    @rule(uid=st.integers(0, 4))
    def flush(self, uid):
        release, free = self.capacity.release(), self.state.free_blocks
        if uid in self.model:
            release.add(uid)
        assert self.state.flush(uid) == (self.model.pop(uid, None) is not None)
        after = tuple(a + b for a, b in zip(free, release.blocks, strict=True))
        assert self.state.free_blocks == after

    @invariant()
    def agrees(self):
        if hasattr(self, "state"):
            self.state.check()
            assert set(self.state.uids) == self.model.keys()
            for uid, (seen, flying, _) in self.model.items():
                assert (self.state[uid].seen, self.state[uid].in_flight) == (seen, flying)


TestStates = States.TestCase
TestStates.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
