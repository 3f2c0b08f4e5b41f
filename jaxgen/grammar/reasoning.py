"""A grammar that holds for the answer alone: what a model thinks before it is free."""

from typing import Self

import numpy as np

from jaxgen.grammar.token_mask import MaskSource
from jaxgen.text.tokenizer import Tokenizer


class AnswerOnly:
    """A MaskSource: anything up to the end mark, then what `rule` lets come.

    With an opening mark the text may begin with that one token and end its thoughts with the end
    mark, or be an answer from its beginning.
    """

    changes = True

    def __init__(
        self, rule: MaskSource, tokenizer: Tokenizer, end: str, opening: str | None
    ) -> None:
        self._rule = rule
        self._tokenizer = tokenizer
        self._end = end.encode()
        self._opening = None if opening is None else tokenizer.token_to_id(opening)
        self._undecided = opening is not None
        self._thinks = opening is None
        self._tail = b""

    @property
    def ended(self) -> bool:
        """Whether nothing can follow."""
        return not self._thinks and self._rule.ended

    def advance(self, token: int) -> None:
        """The token was said. What it spells behind the mark is not held against the answer."""
        if self._undecided:
            self._undecided = False
            self._thinks = token == self._opening
        if not self._thinks:
            self._rule.advance(token)
            return
        said = self._tail + self._tokenizer.token_bytes(token)
        self._thinks = self._end not in said
        self._tail = said[max(0, len(said) + 1 - len(self._end)) :]

    def write(self, mask: np.ndarray) -> None:
        """Clears the bits of what may not come next."""
        if self._thinks:
            return
        free = self._undecided and self._opening is not None and _has(mask, self._opening)
        self._rule.write(mask)
        if free and self._opening is not None:
            mask.view(np.uint32)[self._opening // 32] |= np.uint32(1 << self._opening % 32)

    def copy(self) -> Self:
        """Another that stands where this one does."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._rule = self._rule.copy()
        return twin


def _has(mask: np.ndarray, token: int) -> bool:
    return bool(mask.view(np.uint32)[token // 32] >> token % 32 & 1)
