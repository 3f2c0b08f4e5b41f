"""What bounds a step: fixed limits of the engine, and what the planner asks of the block pools."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxgen.ragged.capacity import Release
from jaxgen.ragged.prefix_cache import BlockName, Hit


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of every step of one engine.

    max_tokens: tokens in one step, the SplitFuse budget.
    max_sequences: sequences in one step, and sequences that run at once; at most max_tokens.
    no_chunking: the model needs each prompt whole in one step.
    recompute_at: a sequence that grows past this many tokens is computed anew from its first token,
        once (a model whose rotary factors change there).
    max_waiting: requests that may wait when another is submitted; None for any number.
    sizes: tokens of compiled steps whose time grows with their tokens: what lies between two of
        them is padded to the larger.
    """

    max_tokens: int
    max_sequences: int
    no_chunking: bool = False
    recompute_at: int | None = None
    max_waiting: int | None = None
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """ValueError unless 1 <= max_sequences <= max_tokens: each decode must get its token."""
        if not 1 <= self.max_sequences <= self.max_tokens:
            raise ValueError(
                "A step needs 1 <= max_sequences <= max_tokens, got "
                f"{self.max_sequences} and {self.max_tokens}."
            )


class Capacity(Protocol):
    """The pools as planning sees them; jaxgen.ragged.capacity answers for a StateManager.

    Tuples have one entry per cache group. A uid that is not tracked has no tokens and no blocks.
    """

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Free blocks."""
        ...

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Free and used blocks."""
        ...

    @property
    def free_sequences(self) -> int:
        """How many more sequences can be tracked."""
        ...

    @property
    def free_slots(self) -> int:
        """How many more of them can sample."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    def tracked(self, uid: int) -> bool:
        """Whether the uid holds state."""
        ...

    def length(self, uid: int) -> int:
        """Tokens of the sequence so far."""
        ...

    def blocks_needed(self, uid: int, tokens: int) -> int:
        """New blocks, in each group, for `tokens` more in one step."""
        ...

    def fitting_tokens(self, uid: int, tokens: int, blocks: int) -> int:
        """How many of `tokens` more fit in `blocks` new ones of each group."""
        ...

    def release(self) -> Release:
        """Adds up the blocks that flushing some sequences would free."""
        ...

    def hit(self, names: Sequence[BlockName]) -> Hit:
        """What a sequence whose first blocks have these names need not compute."""
        ...

    def blocks_to_begin(self, tokens: int, hit: Hit, step_tokens: int) -> tuple[int, ...]:
        """The most free blocks that a new sequence of `tokens`, begun with a hit, takes at once."""
        ...

    def blocks_to_finish(self, uid: int, tokens: int, step_tokens: int) -> tuple[int, ...]:
        """The most new blocks held at once while `tokens` more are computed step by step."""
        ...

    def peak_blocks(self, length: int, step_tokens: int) -> tuple[int, ...]:
        """The most blocks that a sequence growing to `length` holds at once."""
        ...
