"""What a generation loop has done since it began."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

STEP_TOKEN_BOUNDS = (1, *(2**power for power in range(3, 15)))
"""1, 8, 16 ... 16384 tokens."""


class Tally:
    """A histogram that costs the one thread which fills it a bisection; others may read.

    counts: of the values up to each of `bounds` that exceed the bound before, then of those beyond
    the last. total: of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: ascending."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class Counters:
    """Grows by each step; one thread writes, others may read.

    prompt_tokens: computed, those of preempted requests again. generation_tokens: sampled and kept.
    padding_tokens: of the steps' shapes, beyond their tokens. step_tokens: of each step,
    what is sampled at a prompt's end counted too.
    prefix_hits, prefix_queries: prompt tokens found in the prefix cache, and looked up there.
    corrupted: continuations that ended because no token could be drawn from their logits.
    last_step_seconds: from reading one step to reading the next, while there are steps.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    padding_tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    prefix_queries: int = 0
    corrupted: int = 0
    last_step_seconds: float = 0.0
    step_tokens: Tally = field(default_factory=lambda: Tally(STEP_TOKEN_BOUNDS))
