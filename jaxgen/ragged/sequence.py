"""The tracked sequences: how much of each is in the cache, and which blocks it owns.

Their numbers lie in arrays, one row a sequence, so that a step changes many rows at once. Only
their StateManager changes them.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose KV blocks are given out and dropped together.

    window: how many tokens a query sees, itself included; None for all of them. Blocks that lie
    wholly behind the window of the next query are given back.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        """ValueError for a window that sees nothing."""
        if self.window is not None and self.window < 1:
            raise ValueError(f"A window must be at least 1, got {self.window}.")

    def first_block(self, seen: int, block_size: int) -> int:
        """The first block that the query at position `seen` still needs.

        Example: window 4, blocks of 2: the query at position 7 sees 4..7, so it needs block 2 on.
        """
        if self.window is None:
            return 0
        return max(0, seen - self.window + 1) // block_size


class SequenceArrays:
    """One row a sequence, int32; one row more, which stays empty, stands for an unknown uid.

    seen: tokens in the cache. in_flight: tokens that the step now being prepared adds.
    anchors: length of the prompt, which rotary frequencies that depend on a length are made for.
    slots: the row in the sampler's state; the number of slots for a sequence that never samples.
    end_blocks, first_blocks [groups, rows]: blocks [first_blocks[g], end_blocks) of the sequence
        are owned, in each cache group g.
    """

    __slots__ = ("_numbers", "anchors", "end_blocks", "first_blocks", "in_flight", "seen", "slots")

    def __init__(self, max_tracked: int, num_slots: int, num_groups: int) -> None:
        """Nothing is in the cache."""
        self._numbers = np.zeros((5, max_tracked + 1), np.int32)
        self.seen, self.in_flight, self.anchors, self.slots, self.end_blocks = self._numbers
        self.slots[:] = num_slots
        self.first_blocks = np.zeros((num_groups, max_tracked + 1), np.int32)

    def gather(self, indices: np.ndarray) -> np.ndarray:
        """int32 [5, rows], a copy: seen, in_flight, anchors, slots, end_blocks of these rows."""
        return self._numbers[:, indices]

    def widest(self, indices: np.ndarray) -> int:
        """Width of the block table that these rows need."""
        return int(self.end_blocks[indices].max(initial=0))

    def begin(self, index: int, slot: int, anchor: int) -> None:
        """The row belongs to a new sequence, with nothing in the cache."""
        self.seen[index] = self.in_flight[index] = self.end_blocks[index] = 0
        self.first_blocks[:, index] = 0
        self.slots[index] = slot
        self.anchors[index] = anchor


class Sequence:
    """One uid and its row of the arrays; its numbers mean nothing once it is flushed.

    index: its row, also in the state manager's block tables.
    """

    __slots__ = ("_arrays", "index", "uid")

    def __init__(self, uid: int, index: int, arrays: SequenceArrays) -> None:
        self.uid = uid
        self.index = index
        self._arrays = arrays

    def __repr__(self) -> str:
        """Uid and token counts, for error messages and debuggers."""
        return f"Sequence(uid={self.uid}, seen={self.seen}, in_flight={self.in_flight})"

    @property
    def seen(self) -> int:
        """Tokens in the cache: positions [0, seen)."""
        return int(self._arrays.seen[self.index])

    @property
    def in_flight(self) -> int:
        """Tokens that the step now being prepared adds."""
        return int(self._arrays.in_flight[self.index])

    @property
    def length(self) -> int:
        """Tokens after the step now being prepared."""
        return self.seen + self.in_flight

    @property
    def anchor(self) -> int:
        """Length of its prompt."""
        return int(self._arrays.anchors[self.index])

    @property
    def slot(self) -> int:
        """Its row in the sampler's state."""
        return int(self._arrays.slots[self.index])

    @property
    def end_block(self) -> int:
        """One past the last block that it owns."""
        return int(self._arrays.end_blocks[self.index])

    @property
    def first_blocks(self) -> list[int]:
        """The first block that it owns, in each cache group."""
        return self._arrays.first_blocks[:, self.index].tolist()
