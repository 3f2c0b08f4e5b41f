"""What always holds of the host state; tests ask after every step, a debugger may ask any time."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxgen.ragged.state import StateManager


def check_state(state: "StateManager", free_indices: list[int], free_slots: list[int]) -> None:
    """AssertionError unless rows, slots and blocks are each free or owned as often as counted."""
    sequences = [state[uid] for uid in state.uids]
    indices = [sequence.index for sequence in sequences]
    assert sorted([*indices, *free_indices]) == list(range(state.max_tracked))
    slots = [sequence.slot for sequence in sequences if sequence.slot < state.num_slots]
    assert sorted([*slots, *free_slots]) == list(range(state.num_slots))
    for sequence in sequences:
        assert 0 <= sequence.length <= state.max_context, f"{sequence} is too long"
        assert sequence.length <= sequence.end_block * state.block_size, f"{sequence} lacks blocks"
    for group, allocator in enumerate(state.allocators):
        allocator.check()
        assert allocator.free_blocks + allocator.used_blocks == allocator.num_blocks
        _check_table(state, group)
        _check_names(state, group)


def _check_table(state: "StateManager", group: int) -> None:
    table, total = state.tables[group], state.num_blocks[group]
    owned = np.zeros_like(table, dtype=bool)
    for uid in state.uids:
        sequence = state[uid]
        first = sequence.first_blocks[group]
        needed = state.groups[group].first_block(sequence.seen, state.block_size)
        assert first <= needed, f"{sequence} lost a block that its window needs"
        owned[sequence.index, first : sequence.end_block] = True
    assert (table[~owned] == total).all(), "a table maps what is not owned"
    assert (table[owned] < total).all(), "a table lacks what is owned"
    owners = np.bincount(table[owned], minlength=total)
    counts = state.allocators[group].counts
    assert np.array_equal(owners, counts), "a block is in two places without a count, or lost"


def _check_names(state: "StateManager", group: int) -> None:
    """What is kept is what has a name, and who shares a block will not write it."""
    if state.prefix_cache is None:
        return
    named = state.prefix_cache.named(group)
    assert len(set(named.values())) == len(named), "two blocks have one name"
    kept = state.allocators[group].kept
    assert sorted(named) == np.flatnonzero(kept).tolist(), "what is named and what is kept differ"
    table = state.tables[group]
    for uid in state.uids:
        sequence = state[uid]
        written = table[sequence.index, sequence.seen // state.block_size : sequence.end_block]
        assert not kept[written].any(), f"{sequence} will write a block that others may read"
