"""Where a continuation stands in what its output must be."""

import numpy as np
from llguidance import LLMatcher

from jaxgen.grammar.token_mask import ConstraintFailed
from jaxgen.sampling.structured import NAME


class Matcher:
    """Where one continuation stands in its grammar: a MaskSource."""

    changes = True

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._row = np.empty(words, np.int32)
        self._check()

    @property
    def ended(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()

    def advance(self, token: int) -> None:
        """The token was said."""
        self._matcher.consume_token(token)
        self._check()

    def write(self, mask: np.ndarray) -> None:
        """Clears the bits of what the grammar does not let come next."""
        row = self._row
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()
        mask &= row[: mask.size]

    def copy(self) -> "Matcher":
        """Another that stands where this one does."""
        return Matcher(self._matcher.deep_copy(), self._row.size)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintFailed(f"{NAME}: {self._matcher.get_error().strip()}")
