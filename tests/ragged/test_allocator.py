"""The block allocator: refused calls leave no trace, and no block is ever in two places."""

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxgen.ragged.allocator import BlockAllocator, OutOfBlocks


@pytest.mark.parametrize("size", [0, -1])
def test_no_blocks_are_refused(size):
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockAllocator(size)


def test_allocations_are_unique_until_none_is_left():
    allocator = BlockAllocator(16)
    ids = np.concatenate([allocator.allocate(count) for count in (4, 2, 2, 2, 6)])
    assert sorted(ids.tolist()) == list(range(16))
    assert (allocator.free_blocks, allocator.used_blocks) == (0, 16)
    with pytest.raises(OutOfBlocks, match="1 blocks are asked for, 0 of 16 are free"):
        allocator.allocate(1)
    allocator.free(ids)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(17)
    assert allocator.free_blocks == 16
    with pytest.raises(ValueError, match="free already"):
        allocator.free(int(ids[0]))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (-1, "must lie in"),
        (2, "must lie in"),
        ([0, 2], "must lie in"),
        ([0, 1, 0], "given twice"),
        ([0.0], "must be integers"),
        ([[0], [1]], "must be integers in a list"),
    ],
)
@pytest.mark.parametrize("call", ["free", "share"])
def test_a_refused_list_changes_nothing(ids, message, call):
    allocator = BlockAllocator(2)
    allocator.allocate(2)
    with pytest.raises(ValueError, match=message):
        getattr(allocator, call)(ids)
    assert allocator.free_blocks == 0
    assert allocator.counts.tolist() == [1, 1]


def test_valid_and_free_ids_mixed_free_nothing():
    allocator = BlockAllocator(4)
    ids = allocator.allocate(2)
    unused = next(block for block in range(4) if block not in ids)
    with pytest.raises(ValueError, match="free already"):
        allocator.free([*ids, unused])
    assert allocator.free_blocks == 2


class Allocator(RuleBasedStateMachine):
    """Against a dictionary of owner counts, with every kind of bad call."""

    @initialize(size=st.integers(1, 12))
    def build(self, size):
        self.allocator = BlockAllocator(size)
        self.owners = {}

    @rule(count=st.integers(-1, 14))
    def allocate(self, count):
        if 0 <= count <= self.allocator.num_blocks - len(self.owners):
            ids = self.allocator.allocate(count)
            assert ids.dtype == np.int32
            assert len(set(ids.tolist())) == count
            assert not set(ids.tolist()) & self.owners.keys()
            self.owners |= dict.fromkeys(ids.tolist(), 1)
        else:
            with pytest.raises(ValueError, match=r"asked for|negative"):
                self.allocator.allocate(count)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), share=st.booleans())
    def free_or_share(self, data, share):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.owners)), unique=True))
        if share:
            self.allocator.share(ids)
        else:
            gone = [block for block in ids if self.owners[block] == 1]
            assert self.allocator.free(np.array(ids, np.int64)) == len(gone)
        for block in ids:
            self.owners[block] += 1 if share else -1
            if not self.owners[block]:
                del self.owners[block]

    @rule(ids=st.lists(st.integers(-3, 15), min_size=1, max_size=6), share=st.booleans())
    def any_ids(self, ids, share):
        valid = len(set(ids)) == len(ids) and set(ids) <= self.owners.keys()
        if not valid:
            with pytest.raises(ValueError, match="Block"):
                self.allocator.share(ids) if share else self.allocator.free(ids)

    @invariant()
    def agrees(self):
        if hasattr(self, "allocator"):
            self.allocator.check()
            counts = self.allocator.counts
            assert {i: int(counts[i]) for i in np.flatnonzero(counts).tolist()} == self.owners
            assert self.allocator.used_blocks == len(self.owners)


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
