"""What still fits: read-only arithmetic over a StateManager, for whoever asks before doing.

Blocks behind a window go at commit, so that a step needs the same number of new blocks in every
group; what differs between groups is how many a sequence holds at once.
"""

from collections.abc import Sequence as Items

import numpy as np

from jaxgen.ragged.prefix_cache import BlockName, Hit
from jaxgen.ragged.sequence import CacheGroup, Sequence
from jaxgen.ragged.state import StateManager


class Release:
    """Sequences that are to be flushed together, and the blocks that come free by that.

    blocks: of each cache group; a block that some of them share counts once, if they alone have it.
    """

    __slots__ = ("_counts", "_state", "blocks")

    def __init__(self, state: StateManager) -> None:
        """No sequence."""
        self._state = state
        self._counts: list[np.ndarray] | None = None
        self.blocks = [0] * len(state.groups)

    def add(self, uid: int) -> None:
        """One more tracked sequence."""
        if self._counts is None:
            self._counts = [allocator.counts.copy() for allocator in self._state.allocators]
        sequence = self._state[uid]
        for group, first in enumerate(sequence.first_blocks):
            ids = self._state.tables[group][sequence.index, first : sequence.end_block]
            counts = self._counts[group]
            counts[ids] -= 1
            self.blocks[group] += int((counts[ids] == 0).sum())


class Capacity:
    """Answers about one StateManager, true until it next changes. An unknown uid has no tokens."""

    __slots__ = ("_no_hit", "_nothing", "_state")

    def __init__(self, state: StateManager) -> None:
        """Looks at `state`, always as it is at the time of the question."""
        self._state = state
        self._nothing = Sequence(-1, state.max_tracked, state.arrays)
        self._no_hit = Hit(0, (0,) * len(state.groups), (0,) * len(state.groups))

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Free blocks of each cache group."""
        return self._state.free_blocks

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each cache group."""
        return self._state.num_blocks

    @property
    def free_sequences(self) -> int:
        """How many more sequences can be tracked."""
        return self._state.free_sequences

    @property
    def free_slots(self) -> int:
        """How many more sampled sequences have a slot."""
        return self._state.free_slots

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence."""
        return self._state.max_context

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._state.block_size

    def tracked(self, uid: int) -> bool:
        """Whether the uid holds state."""
        return uid in self._state

    def length(self, uid: int) -> int:
        """Tokens of the sequence, those in flight included."""
        return self._find(uid).length

    def blocks_needed(self, uid: int, tokens: int) -> int:
        """New blocks, in each cache group, for `tokens` more in one step."""
        sequence = self._find(uid)
        end = -(-(sequence.length + tokens) // self._state.block_size)
        return end - sequence.end_block

    def fitting_tokens(self, uid: int, tokens: int, blocks: int) -> int:
        """How many of `tokens` more fit when `blocks` new ones may be taken in each cache group.

        The longest context bounds it too.
        """
        sequence = self._find(uid)
        room = (sequence.end_block + blocks) * self._state.block_size - sequence.length
        return max(0, min(tokens, room, self._state.max_context - sequence.length))

    def release(self) -> Release:
        """Adds up the blocks that flushing some sequences would free."""
        return Release(self._state)

    def hit(self, names: Items[BlockName]) -> Hit:
        """What a sequence whose first blocks have these names need not compute."""
        state = self._state
        found = 0 if state.prefix_cache is None else state.prefix_cache.find(names)
        if not found:
            return self._no_hit
        assert state.prefix_cache is not None
        owned = [ids for _, ids in state.prefix_cache.owned(names[:found])]
        unowned = [
            int((allocator.counts[ids] == 0).sum())
            for allocator, ids in zip(state.allocators, owned, strict=True)
        ]
        return Hit(found * state.block_size, tuple(map(len, owned)), tuple(unowned))

    def blocks_to_finish(self, uid: int, tokens: int, step_tokens: int) -> tuple[int, ...]:
        """The most new blocks held at once, per group, while `tokens` more are computed.

        step_tokens: the most that one step adds.
        """
        sequence = self._find(uid)
        needed = self.blocks_needed(uid, tokens)
        peaks = self.peak_blocks(sequence.length + tokens, step_tokens)
        return tuple(
            max(0, min(needed, peak - (sequence.end_block - first)))
            for peak, first in zip(peaks, sequence.first_blocks, strict=True)
        )

    def blocks_to_begin(self, tokens: int, hit: Hit, step_tokens: int) -> tuple[int, ...]:
        """The most free blocks, per group, that a new sequence of `tokens` takes at once.

        hit: what it begins with, blocks that nobody owns now included.
        """
        needed = -(-(tokens - hit.tokens) // self._state.block_size)
        peaks = self.peak_blocks(tokens, step_tokens)
        return tuple(
            max(0, min(needed, peak - held)) + taken
            for peak, held, taken in zip(peaks, hit.held, hit.taken, strict=True)
        )

    def peak_blocks(self, length: int, step_tokens: int) -> tuple[int, ...]:
        """The most blocks that a sequence growing to `length` holds at once, per group."""
        whole = -(-length // self._state.block_size)
        return tuple(
            min(whole, self._window_blocks(cache, step_tokens)) if cache.window else whole
            for cache in self._state.groups
        )

    def max_sequence_tokens(self, step_tokens: int) -> int:
        """The longest sequence that the pools hold when nothing else is tracked."""
        longest = self._state.max_context
        for cache, blocks in zip(self._state.groups, self.num_blocks, strict=True):
            if cache.window is None or self._window_blocks(cache, step_tokens) > blocks:
                longest = min(longest, blocks * self._state.block_size)
        return longest

    def remaining_block_capacity(self, uid: int) -> int:
        """Tokens that fit in the blocks which the sequence owns already."""
        sequence = self._find(uid)
        return sequence.end_block * self._state.block_size - sequence.length

    def query(self, uid: int, max_tokens: int, max_blocks: int) -> tuple[int, int]:
        """(tokens, blocks): how many of the wanted tokens fit, and the new blocks that costs.

        max_blocks and the answer count the blocks of each cache group. (0, 0) for an unknown uid
        when no more sequences can be tracked. ValueError for negative numbers.
        """
        if max_tokens < 0 or max_blocks < 0:
            raise ValueError(
                f"Tokens and blocks must not be negative, got {max_tokens} and {max_blocks}."
            )
        if uid not in self._state and not self._state.free_sequences:
            return 0, 0
        tokens = self.fitting_tokens(uid, max_tokens, max_blocks)
        return tokens, self.blocks_needed(uid, tokens)

    def _find(self, uid: int) -> Sequence:
        return self._state.get(uid, self._nothing)

    def _window_blocks(self, cache: CacheGroup, step_tokens: int) -> int:
        """Blocks touched by the widest span that a step reads and writes, wherever it begins."""
        assert cache.window is not None
        span = cache.window - 1 + step_tokens
        return (span + self._state.block_size - 2) // self._state.block_size + 1
