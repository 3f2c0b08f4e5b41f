"""The one owner of host state: uid -> sequence -> blocks per cache group.

A step is a transaction: reserve each sequence's tokens, pack and dispatch, then commit; rollback
if it was not dispatched. What a device still reads may be freed at once, since steps run in order.
"""

from collections.abc import Iterable, Sequence as Items
from heapq import heappop, heappush

import numpy as np

from jaxgen.ragged.allocator import BlockAllocator, OutOfBlocks
from jaxgen.ragged.sequence import CacheGroup, Sequence


class TooManySequences(RuntimeError):
    """No more sequences can be tracked, or sampled, until one is flushed."""


class ContextOverflow(ValueError):
    """A sequence would grow past the longest context."""


class StateManager:
    """Sequences, their blocks in every cache group, and their slots in the sampler's state.

    Attributes (read only): groups, num_blocks (per group), block_size (tokens), max_context (tokens
    of one sequence), max_blocks (width of a block table), max_tracked, num_slots, and
    tables: per group int32 [max_tracked, max_blocks], row Sequence.index, column block of the
    sequence; entries that are not owned hold num_blocks[group], an id just past the pool.
    """

    def __init__(
        self,
        groups: Items[CacheGroup],
        num_blocks: Items[int],
        *,
        block_size: int,
        max_context: int,
        max_tracked: int,
        num_slots: int | None = None,
    ) -> None:
        """Nothing is tracked. num_slots: sequences that can sample; None for all the tracked.

        ValueError for no group, unequal numbers of groups and sizes, or a size below 1.
        """
        if not groups or len(groups) != len(num_blocks):
            raise ValueError(
                "Each cache group needs its number of blocks, got "
                f"{len(groups)} groups and {len(num_blocks)} numbers."
            )
        num_slots = max_tracked if num_slots is None else num_slots
        if min(block_size, max_context, max_tracked, num_slots) < 1:
            raise ValueError(
                "block_size, max_context, max_tracked and num_slots must be at least 1, got "
                f"{block_size}, {max_context}, {max_tracked} and {num_slots}."
            )
        self.groups = tuple(groups)
        self.block_size = block_size
        self.max_context = max_context
        self.max_tracked = max_tracked
        self.num_slots = num_slots
        self.allocators = tuple(BlockAllocator(count) for count in num_blocks)
        self.tables = tuple(
            np.full((max_tracked, self.max_blocks), count, dtype=np.int32) for count in num_blocks
        )
        self._sequences: dict[int, Sequence] = {}
        self._free_indices = list(range(max_tracked))
        self._free_slots = list(range(num_slots))

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each cache group, free and used."""
        return tuple(allocator.num_blocks for allocator in self.allocators)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Free blocks of each cache group."""
        return tuple(allocator.free_blocks for allocator in self.allocators)

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_context // self.block_size)

    @property
    def free_sequences(self) -> int:
        """How many more sequences can be tracked."""
        return len(self._free_indices)

    @property
    def free_slots(self) -> int:
        """How many more of them can sample."""
        return len(self._free_slots)

    @property
    def uids(self) -> Iterable[int]:
        """The tracked uids, oldest first."""
        return self._sequences.keys()

    def __contains__(self, uid: int) -> bool:
        """Whether the uid is tracked."""
        return uid in self._sequences

    def __len__(self) -> int:
        """Tracked sequences."""
        return len(self._sequences)

    def __getitem__(self, uid: int) -> Sequence:
        """The sequence of a tracked uid. KeyError otherwise."""
        return self._sequences[uid]

    def get(self, uid: int, default: Sequence) -> Sequence:
        """The sequence of a tracked uid, or the default."""
        return self._sequences.get(uid, default)

    def track(self, uid: int, *, sampled: bool = False, anchor: int = 0) -> Sequence:
        """Begins an empty sequence; a sampled one gets a slot.

        anchor: length of its prompt; 0 takes the tokens of its first step for the prompt.
        TooManySequences if there is no room, ValueError if the uid is tracked already.
        """
        if uid in self._sequences:
            raise ValueError(f"Sequence {uid} is tracked already: flush it first.")
        if not self._free_indices:
            raise TooManySequences(
                f"All {self.max_tracked} sequences are tracked: flush one, or raise "
                "max_tracked_sequences."
            )
        if sampled and not self._free_slots:
            raise TooManySequences(
                f"All {self.num_slots} sampler slots are taken: flush a sequence, or raise "
                "max_num_seqs."
            )
        slot = heappop(self._free_slots) if sampled else self.num_slots
        sequence = Sequence(uid, heappop(self._free_indices), slot, len(self.groups))
        sequence.anchor = anchor
        self._sequences[uid] = sequence
        return sequence

    def reserve(self, uid: int, tokens: int) -> Sequence:
        """Puts tokens in flight, with blocks for them in every group, or changes nothing.

        KeyError for an unknown uid, ValueError for less than 1 token, ContextOverflow, OutOfBlocks.
        """
        sequence = self._sequences[uid]
        if tokens < 1:
            raise ValueError(f"A step adds at least 1 token to a sequence, got {tokens}.")
        length = sequence.length + tokens
        if length > self.max_context:
            raise ContextOverflow(
                f"Sequence {uid} has {sequence.length} tokens; {tokens} more exceed the context of "
                f"{self.max_context}."
            )
        end = -(-length // self.block_size)
        added = end - sequence.end_block
        if added > 0:
            self._extend(sequence, end, added)
        sequence.in_flight += tokens
        if not sequence.anchor:
            sequence.anchor = tokens
        return sequence

    def _extend(self, sequence: Sequence, end: int, added: int) -> None:
        for group, free in enumerate(self.free_blocks):
            if added > free:
                raise OutOfBlocks(
                    f"Sequence {sequence.uid} needs {added} more blocks, {free} of "
                    f"{self.num_blocks[group]} are free in cache group {group}: flush sequences, "
                    "or give the KV cache more memory."
                )
        for allocator, table in zip(self.allocators, self.tables, strict=True):
            table[sequence.index, sequence.end_block : end] = allocator.allocate(added)
        sequence.end_block = end

    def commit(self, uid: int) -> None:
        """The tokens in flight are in the cache; blocks behind a window are free. KeyError."""
        sequence = self._sequences[uid]
        sequence.seen += sequence.in_flight
        sequence.in_flight = 0
        for group, cache in enumerate(self.groups):
            if cache.window is not None:
                self._drop(sequence, group, cache.first_block(sequence.seen, self.block_size))

    def _drop(self, sequence: Sequence, group: int, first: int) -> None:
        """Frees the group's blocks before `first`."""
        begin = sequence.first_blocks[group]
        if first > begin:
            row = self.tables[group][sequence.index]
            self.allocators[group].free(row[begin:first])
            row[begin:first] = self.num_blocks[group]
            sequence.first_blocks[group] = first

    def rollback(self, uid: int, tokens: int | None = None) -> None:
        """Takes back the last `tokens` in flight (all of them), and the blocks only they needed.

        KeyError for an unknown uid, ValueError for more tokens than are in flight.
        """
        sequence = self._sequences[uid]
        tokens = sequence.in_flight if tokens is None else tokens
        if not 0 <= tokens <= sequence.in_flight:
            raise ValueError(
                f"Sequence {uid} has {sequence.in_flight} tokens in flight, cannot take back "
                f"{tokens}."
            )
        sequence.in_flight -= tokens
        end = -(-sequence.length // self.block_size)
        if end == sequence.end_block:
            return
        for allocator, table in zip(self.allocators, self.tables, strict=True):
            row = table[sequence.index]
            allocator.free(row[end : sequence.end_block])
            row[end : sequence.end_block] = allocator.num_blocks
        sequence.end_block = end

    def flush(self, uid: int) -> bool:
        """Forgets the sequence and frees all that it owns; False if the uid was not tracked."""
        sequence = self._sequences.pop(uid, None)
        if sequence is None:
            return False
        for group, allocator in enumerate(self.allocators):
            row = self.tables[group][sequence.index]
            owned = slice(sequence.first_blocks[group], sequence.end_block)
            allocator.free(row[owned])
            row[owned] = allocator.num_blocks
        heappush(self._free_indices, sequence.index)
        if sequence.slot < self.num_slots:
            heappush(self._free_slots, sequence.slot)
        return True

    def check(self) -> None:
        """AssertionError unless every invariant holds; for tests and for a look at live state."""
        indices = [sequence.index for sequence in self._sequences.values()]
        assert sorted([*indices, *self._free_indices]) == list(range(self.max_tracked))
        slots = [sequence.slot for sequence in self._sequences.values()]
        taken = [slot for slot in slots if slot < self.num_slots]
        assert sorted([*taken, *self._free_slots]) == list(range(self.num_slots))
        for sequence in self._sequences.values():
            assert 0 <= sequence.length <= self.max_context, f"{sequence} is too long"
            assert sequence.length <= sequence.end_block * self.block_size, (
                f"{sequence} lacks blocks"
            )
        for group, allocator in enumerate(self.allocators):
            allocator.check()
            assert allocator.free_blocks + allocator.used_blocks == allocator.num_blocks
            self._check_table(group)

    def _check_table(self, group: int) -> None:
        table, total = self.tables[group], self.num_blocks[group]
        owned = np.zeros_like(table, dtype=bool)
        for sequence in self._sequences.values():
            first = sequence.first_blocks[group]
            needed = self.groups[group].first_block(sequence.seen, self.block_size)
            assert first <= needed, f"{sequence} lost a block that its window needs"
            owned[sequence.index, first : sequence.end_block] = True
        assert (table[~owned] == total).all(), "a table maps what is not owned"
        assert (table[owned] < total).all(), "a table lacks what is owned"
        owners = np.bincount(table[owned], minlength=total)
        counts = self.allocators[group].counts
        assert np.array_equal(owners, counts), "a block is in two places without a count, or lost"
