"""Blocks named by what they hold: who finds which, what a window needs, what is reclaimed first."""

import pytest

from jaxgen.ragged.allocator import BlockAllocator
from jaxgen.ragged.capacity import Capacity
from jaxgen.ragged.prefix_cache import Hit, PrefixCache
from jaxgen.ragged.sequence import CacheGroup
from jaxgen.ragged.state import StateManager


def manager(windows=(None,), blocks=16, **options):
    groups = [CacheGroup(window) for window in windows]
    return StateManager(
        groups,
        [blocks] * len(groups),
        block_size=4,
        max_context=64,
        max_tracked=6,
        prefix_cache=PrefixCache(groups, 4, **options),
    )


def names_of(cache, tokens, anchor=1, salt=None):
    names = []
    cache.extend(cache.root(anchor, salt), names, tokens)
    return names


def compute(state, uid, tokens, step=4):
    """Computes the tokens of a new sequence step by step, and publishes every whole block."""
    names = names_of(state.prefix_cache, tokens)
    found = state.prefix_cache.find(names[: (len(tokens) - 1) // 4])
    state.track(uid)
    if found:
        state.adopt(uid, names[:found])
    for begin in range(4 * found, len(tokens), step):
        state.reserve(uid, len(tokens[begin : begin + step]))
        length = state[uid].length
        state.publish(uid, names[: length // 4], found)
        found = length // 4
        state.commit(uid)
        state.check()


def test_names_follow_from_all_that_comes_before():
    cache = PrefixCache([CacheGroup()], 4, length_class=lambda length: max(length, 10))
    tokens = list(range(11))
    whole = names_of(cache, tokens)
    assert len(whole) == 2
    assert {len(name) for name in whole} == {32}
    grown = []
    root = cache.root(1, None)
    cache.extend(root, grown, tokens[:7])
    cache.extend(root, grown, tokens[4:])
    assert grown == whole
    others = [
        names_of(cache, [99, *tokens[1:]]),
        names_of(cache, tokens, salt=""),
        names_of(cache, tokens, salt="a"),
        names_of(cache, tokens, anchor=11),
        names_of(cache, [*tokens[4:8], *tokens[4:8]]),
    ]
    assert len({name for other in [whole, *others] for name in other}) == 12
    assert names_of(cache, tokens, anchor=10) == whole


def test_the_longest_beginning_that_all_groups_have():
    cache = PrefixCache([CacheGroup(), CacheGroup(6)], 4)
    names = names_of(cache, range(20))
    assert cache.find(names) == 0
    cache.add(0, names, range(5))
    assert cache.find(names) == 0
    # Behind 3 blocks a window of 6 sees tokens 7 to 11: blocks 1 and 2.
    cache.add(1, names[1:3], [1, 2])
    assert cache.find(names) == 3
    assert cache.find(names[:2]) == 0
    assert cache.owned(names[:3]) == [(0, [0, 1, 2]), (1, [1, 2])]
    cache.add(1, names[4:], [4])
    assert cache.find(names) == 3
    cache.forget(0, [1, 9])
    assert cache.find(names) == 0


def test_what_is_kept_is_reclaimed_last_and_the_tail_before_the_beginning():
    allocator = BlockAllocator(6)
    first, second = allocator.allocate(2), allocator.allocate(2)
    allocator.keep([*first, *second])
    allocator.free(second)
    allocator.free(first)
    allocator.check()
    assert allocator.free_blocks == 6
    assert set(allocator.allocate(2).tolist()).isdisjoint([*first, *second])
    assert allocator.allocate(1).tolist() == [second[1]]
    allocator.share([second[0], first[0]])
    assert allocator.free_blocks == 1
    assert allocator.allocate(1).tolist() == [first[1]]
    allocator.check()
    allocator.free([second[0], first[0]])
    allocator.forget_kept()
    with pytest.raises(ValueError, match="free already"):
        allocator.share([int(first[0])])
    allocator.check()


def test_a_sequence_owns_with_others_what_they_have_in_common():
    state = manager()
    compute(state, 1, range(14))
    assert state.free_blocks == (12,)
    compute(state, 2, [*range(10), 50, 51, 52])
    assert state.tables[0][state[1].index, :2].tolist() == state.tables[0][1, :2].tolist()
    assert state.free_blocks == (10,)
    release = Capacity(state).release()
    release.add(1)
    assert release.blocks == [2]
    release.add(2)
    assert release.blocks == [6]
    state.flush(1)
    assert state.free_blocks == (12,)
    state.flush(2)
    assert state.free_blocks == (16,)
    names = names_of(state.prefix_cache, range(14))
    assert Capacity(state).hit(names) == Hit(12, (3,), (3,))
    # The hit costs its own blocks: they are free now.
    assert Capacity(state).blocks_to_begin(14, Hit(12, (3,), (3,)), 8) == (4,)
    assert Capacity(state).blocks_to_begin(14, Hit(12, (3,), (1,)), 8) == (2,)


def test_equal_blocks_computed_twice_stay_apart():
    state = manager()
    for uid in (1, 2):
        state.track(uid)
        state.reserve(uid, 8)
    names = names_of(state.prefix_cache, range(8))
    for uid in (1, 2):
        state.publish(uid, names, 0)
        state.commit(uid)
        state.check()
    state.flush(1)
    assert Capacity(state).hit(names) == Hit(8, (2,), (2,))
    state.flush(2)
    assert state.free_blocks == (16,)


def test_blocks_behind_a_window_are_found_as_long_as_they_are_there():
    state = manager(windows=(6,), blocks=8)
    compute(state, 1, range(24))
    assert state.free_blocks == (6,)
    names = names_of(state.prefix_cache, range(24))
    assert state.prefix_cache.find(names[:3]) == 3
    compute(state, 2, [*range(12), 70, 71])
    assert state[2].first_blocks == [2]
    state.flush(1)
    compute(state, 3, range(100, 124), step=8)  # reclaims the oldest
    assert state.prefix_cache.find(names[:2]) == 0
    state.check()


def test_after_a_reset_nothing_old_is_found_or_published():
    state = manager()
    compute(state, 1, range(8))
    names = names_of(state.prefix_cache, range(16))
    state.flush(1)
    compute(state, 2, range(100, 109))
    state.reset_prefix_cache()
    assert state.prefix_cache.find(names) == 0
    state.publish(2, names_of(state.prefix_cache, range(100, 109)), 0)
    assert state.prefix_cache.named(0) == {}
    state.check()
    state.flush(2)
    compute(state, 3, range(8))
    assert state.prefix_cache.find(names) == 2
