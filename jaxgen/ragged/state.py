"""The one owner of host state: uid -> sequence -> blocks per cache group.

A step is a transaction: reserve each sequence's tokens, pack and dispatch, commit or rollback.
What a device still reads may be freed or shared at once, since steps run in order.
"""

from collections.abc import Iterable, Sequence as Items
from heapq import heappop, heappush

import numpy as np

from jaxgen.ragged.allocator import BlockAllocator, OutOfBlocks
from jaxgen.ragged.invariants import check_state
from jaxgen.ragged.prefix_cache import BlockName, PrefixCache
from jaxgen.ragged.sequence import CacheGroup, Sequence, SequenceArrays


class TooManySequences(RuntimeError):
    """No more sequences can be tracked, or sampled, until one is flushed."""


class ContextOverflow(ValueError):
    """A sequence would grow past the longest context."""


class StateManager:
    """Sequences, their blocks in every cache group, and their slots in the sampler's state.

    Attributes (read only): groups, num_blocks (per group), block_size (tokens), max_context (tokens
    of one sequence), max_blocks (width of a block table), max_tracked, num_slots, prefix_cache,
    arrays, and tables: per group int32 [max_tracked, max_blocks], row Sequence.index, column block
    of the sequence; entries that are not owned hold num_blocks[group], an id just past the pool.
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
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """Nothing is tracked. num_slots: sequences that can sample; None for all the tracked.

        prefix_cache: an empty one for these groups; None for sequences that share nothing.
        ValueError for no group, unequal numbers of groups and sizes, or a size below 1.
        """
        if not groups or len(groups) != len(num_blocks):
            raise ValueError(
                f"{len(groups)} cache groups got {len(num_blocks)} numbers of blocks: one each."
            )
        num_slots = max_tracked if num_slots is None else num_slots
        sizes = (block_size, max_context, max_tracked, num_slots)
        if min(sizes) < 1:
            names = "block_size, max_context, max_tracked, num_slots"
            raise ValueError(f"{names} must be at least 1, got {sizes}.")
        self.groups = tuple(groups)
        self.block_size = block_size
        self.max_context = max_context
        self.max_tracked = max_tracked
        self.num_slots = num_slots
        self.num_blocks = tuple(num_blocks)
        shape = (max_tracked, self.max_blocks)
        self.tables = tuple(np.empty(shape, np.int32) for _ in num_blocks)
        self.prefix_cache = prefix_cache
        self.arrays = SequenceArrays(max_tracked, num_slots, len(groups))
        self._windows = [(g, c.window) for g, c in enumerate(groups) if c.window is not None]
        self.reset()

    def reset(self) -> None:
        """Nothing is tracked and every block is free, whatever was half done before."""
        self.allocators = tuple(BlockAllocator(count) for count in self.num_blocks)
        for table, count in zip(self.tables, self.num_blocks, strict=True):
            table.fill(count)
        self._publishing: set[int] = set()
        self._sequences: dict[int, Sequence] = {}
        self._free_indices = list(range(self.max_tracked))
        self._free_slots = list(range(self.num_slots))
        if self.prefix_cache is not None:
            self.prefix_cache.clear()

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
        sequence = Sequence(uid, heappop(self._free_indices), self.arrays)
        self.arrays.begin(sequence.index, slot, anchor)
        self._sequences[uid] = sequence
        self._publishing.add(uid)
        return sequence

    def adopt(self, uid: int, names: Items[BlockName]) -> None:
        """An empty sequence begins with the blocks of these names, which the cache must have.

        Do so before anything is reserved: that could reclaim them.
        """
        assert self.prefix_cache is not None
        index, end = self._sequences[uid].index, len(names)
        for group, (first, ids) in enumerate(self.prefix_cache.owned(names)):
            self.allocators[group].share(ids)
            self.tables[group][index, first:end] = ids
            self.arrays.first_blocks[group, index] = first
        self.arrays.end_blocks[index] = end
        self.arrays.seen[index] = end * self.block_size

    def reserve(self, uid: int, tokens: int) -> Sequence:
        """Puts tokens in flight, with blocks for them in every group, or changes nothing.

        KeyError for an unknown uid, ValueError for less than 1 token, ContextOverflow, OutOfBlocks.
        """
        sequence = self._sequences[uid]
        if tokens < 1:
            raise ValueError(f"A step adds at least 1 token to a sequence, got {tokens}.")
        if sequence.length + tokens > self.max_context:
            raise ContextOverflow(
                f"{sequence}: {tokens} more tokens exceed the context of {self.max_context}."
            )
        self.reserve_rows(np.array([sequence.index]), np.array([tokens], np.int32))
        return sequence

    def reserve_rows(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """As `reserve`, for many sequences by their index: tokens [rows], each at least 1.

        The context is not checked. OutOfBlocks, and nothing changes, if all together do not fit.
        """
        arrays = self.arrays
        seen, in_flight, anchors, _, begins = arrays.gather(rows)
        in_flight += tokens
        ends = -(-(seen + in_flight) // self.block_size)
        added = ends - begins
        total = int(added.sum())
        if total:
            self._extend(rows, begins, added, total)
            arrays.end_blocks[rows] = ends
        arrays.in_flight[rows] = in_flight
        if not anchors.all():
            arrays.anchors[rows] = np.where(anchors == 0, tokens, anchors)

    def _extend(self, rows: np.ndarray, begins: np.ndarray, added: np.ndarray, total: int) -> None:
        for group, free in enumerate(self.free_blocks):
            if total > free:
                raise OutOfBlocks(
                    f"{total} more blocks are needed, {free} of {self.num_blocks[group]} are free "
                    f"in cache group {group}: flush sequences, or give the KV cache more memory."
                )
        owners = np.repeat(rows, added)
        columns = np.arange(total) - np.repeat(np.cumsum(added) - added - begins, added)
        for group, allocator in enumerate(self.allocators):
            ids = allocator.allocate(total)
            self.tables[group][owners, columns] = ids
            if self.prefix_cache is not None:
                self.prefix_cache.forget(group, ids.tolist())

    def publish(self, uid: int, names: Items[BlockName], begin: int) -> None:
        """Whoever begins alike may share blocks [begin, len(names)) of the sequence.

        The steps that fill them must be dispatched. What it dropped behind a window stays dropped;
        what another published first stays its own. Nothing happens without a prefix cache, or if
        that was reset since the sequence was begun.
        """
        if self.prefix_cache is None or uid not in self._publishing:
            return
        sequence = self._sequences[uid]
        assert len(names) <= sequence.end_block
        for group, first in enumerate(sequence.first_blocks):
            start = max(begin, first)
            ids = self.tables[group][sequence.index, start : len(names)].tolist()
            new = self.prefix_cache.add(group, names[start:], ids)
            self.allocators[group].keep(new)

    def reset_prefix_cache(self) -> None:
        """Forgets what any block holds; sequences that are tracked now publish nothing any more."""
        if self.prefix_cache is None:
            return
        self.prefix_cache.clear()
        self._publishing.clear()
        for allocator in self.allocators:
            allocator.forget_kept()

    def commit(self, uid: int) -> None:
        """The tokens in flight are in the cache; blocks behind a window are free. KeyError."""
        self.commit_rows(np.array([self._sequences[uid].index]))

    def commit_rows(self, rows: np.ndarray) -> None:
        """As `commit`, for many sequences by their index."""
        arrays = self.arrays
        seen = arrays.seen[rows] + arrays.in_flight[rows]
        arrays.seen[rows] = seen
        arrays.in_flight[rows] = 0
        for group, window in self._windows:
            first = np.maximum(0, seen - window + 1) // self.block_size
            for row in np.flatnonzero(first > arrays.first_blocks[group, rows]).tolist():
                self._drop(int(rows[row]), group, int(first[row]))

    def _drop(self, index: int, group: int, first: int) -> None:
        """Frees the group's blocks before `first`."""
        begin = self.arrays.first_blocks[group, index]
        row = self.tables[group][index]
        self.allocators[group].free(row[begin:first])
        row[begin:first] = self.num_blocks[group]
        self.arrays.first_blocks[group, index] = first

    def rollback(self, uid: int, tokens: int | None = None) -> None:
        """Takes back the last `tokens` in flight (all of them), and the blocks only they needed.

        KeyError for an unknown uid, ValueError for more tokens than are in flight.
        """
        sequence = self._sequences[uid]
        tokens = sequence.in_flight if tokens is None else tokens
        if not 0 <= tokens <= sequence.in_flight:
            raise ValueError(f"{sequence} cannot take back {tokens} tokens.")
        self.arrays.in_flight[sequence.index] -= tokens
        end, owned = -(-sequence.length // self.block_size), sequence.end_block
        if end == owned:
            return
        for allocator, table in zip(self.allocators, self.tables, strict=True):
            row = table[sequence.index]
            allocator.free(row[end:owned])
            row[end:owned] = allocator.num_blocks
        self.arrays.end_blocks[sequence.index] = end

    def flush(self, uid: int) -> bool:
        """Forgets the sequence and frees all that it owns; False if the uid was not tracked."""
        sequence = self._sequences.pop(uid, None)
        if sequence is None:
            return False
        for group, first in enumerate(sequence.first_blocks):
            row = self.tables[group][sequence.index]
            owned = slice(first, sequence.end_block)
            self.allocators[group].free(row[owned])
            row[owned] = self.num_blocks[group]
        if sequence.slot < self.num_slots:
            heappush(self._free_slots, sequence.slot)
        heappush(self._free_indices, sequence.index)
        self.arrays.begin(sequence.index, self.num_slots, 0)
        self._publishing.discard(uid)
        return True

    def check(self) -> None:
        """AssertionError unless every invariant holds; for tests and for a look at live state."""
        check_state(self, self._free_indices, self._free_slots)
