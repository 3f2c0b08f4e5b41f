"""The tokens of sequences that `put` began, kept for models that must compute some of them anew.

Whoever schedules requests knows their tokens; a caller of `put` hands each over once.
"""

import numpy as np

from jaxgen.ragged.sequence import Sequence


class Replay:
    """Remembers each sequence until it has outgrown the boundary; nothing where there is none."""

    def __init__(self, boundary: int | None) -> None:
        """boundary: the length past which keys written before are wrong (Limits.recompute_at)."""
        self._boundary = boundary
        self._tokens: dict[int, list[np.ndarray]] = {}

    def outgrown(self, sequence: Sequence, added: int) -> bool:
        """Whether `added` tokens take a sequence past the boundary that its keys are made for."""
        if self._boundary is None:
            return False
        made_for = max(sequence.anchor, sequence.seen)
        return made_for <= self._boundary < sequence.seen + added

    def record(self, sequence: Sequence, tokens: np.ndarray) -> None:
        """The tokens are in the cache."""
        if self._boundary is None:
            return
        if max(sequence.anchor, sequence.seen) > self._boundary:
            self.forget(sequence.uid)
        else:
            self._tokens.setdefault(sequence.uid, []).append(tokens)

    def take(self, uid: int) -> np.ndarray:
        """int32 [tokens] of all that was recorded of a sequence, which is forgotten."""
        return np.concatenate(self._tokens.pop(uid))

    def forget(self, uid: int) -> None:
        """Drops what is kept of a sequence, if anything is."""
        self._tokens.pop(uid, None)
