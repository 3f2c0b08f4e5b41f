"""Sets of token ids as packed bits, as they travel to the sampler."""

from collections.abc import Iterable
from typing import Protocol, Self

import numpy as np


class MaskSource(Protocol):
    """What one rule lets a continuation say next.

    changes: whether that depends on what was said. ended: nothing may follow, and nothing need.
    Each continuation has its own, a copy.
    """

    @property
    def changes(self) -> bool: ...

    @property
    def ended(self) -> bool: ...

    def advance(self, token: int) -> None:
        """The token was said. ConstraintFailed if the rule cannot go on."""
        ...

    def write(self, mask: np.ndarray) -> None:
        """Clears, in a mask of int32 words, the bits of the ids that may not come next."""
        ...

    def copy(self) -> Self:
        """Another that stands where this one does."""
        ...


class ConstraintFailed(RuntimeError):
    """A rule reached a limit of its library, or was broken; the request ends with an error."""


def words_of(vocab_size: int) -> int:
    """int32 words of a mask: bit i % 32 of word i // 32 is token i."""
    return -(-vocab_size // 32)


def ids_of(mask: np.ndarray) -> set[int]:
    """The ids whose bits are set."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def packed(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """int32 [words]: the mask that has exactly these ids."""
    chosen = np.zeros(words_of(vocab_size) * 32, np.bool_)
    chosen[list(ids)] = True
    return np.packbits(chosen, bitorder="little").view(np.int32)
