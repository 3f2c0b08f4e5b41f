"""One tracked sequence: how much of it is in the cache, and which blocks it owns.

Only its StateManager changes it.
"""

from dataclasses import dataclass


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


class Sequence:
    """What is known of one uid. Token positions [0, seen) are in the cache.

    index: its row in the state manager's block tables.
    slot: its row in the sampler's state; the number of slots for a sequence that never samples.
    in_flight: tokens that the step now being prepared adds.
    anchor: length of its prompt, which rotary frequencies that depend on a length are made for.
    end_block: blocks [first_blocks[g], end_block) of the sequence are owned, in each cache group g.
    """

    __slots__ = ("anchor", "end_block", "first_blocks", "in_flight", "index", "seen", "slot", "uid")

    def __init__(self, uid: int, index: int, slot: int, num_groups: int) -> None:
        """A sequence with nothing in the cache."""
        self.uid = uid
        self.index = index
        self.slot = slot
        self.seen = 0
        self.in_flight = 0
        self.anchor = 0
        self.end_block = 0
        self.first_blocks = [0] * num_groups

    def __repr__(self) -> str:
        """Uid and token counts, for error messages and debuggers."""
        return f"Sequence(uid={self.uid}, seen={self.seen}, in_flight={self.in_flight})"

    @property
    def length(self) -> int:
        """Tokens after the step now being prepared."""
        return self.seen + self.in_flight
