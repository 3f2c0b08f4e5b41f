"""Rules over token ids alone: ids that may come at all, and words that may not be completed."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from jaxgen.grammar.token_mask import packed
from jaxgen.sampling import InvalidParameter
from jaxgen.text.tokenizer import Tokenizer


class OnlyListed:
    """Exactly these ids may come, at every position."""

    changes = False
    ended = False

    def __init__(self, ids: Iterable[int], vocab_size: int) -> None:
        self._mask = packed(ids, vocab_size)

    def advance(self, token: int) -> None:
        """Changes nothing."""
        del token

    def write(self, mask: np.ndarray) -> None:
        """Clears all bits but theirs."""
        mask &= self._mask

    def copy(self) -> Self:
        """Itself: it remembers nothing."""
        return self


class BannedWords:
    """A word's last token may not come where its other tokens came just before."""

    ended = False

    def __init__(self, words: Iterable[Sequence[int]], vocab_size: int) -> None:
        """words: token ids of each, at least one."""
        listed = [tuple(word) for word in words]
        self._always = ~packed((word[0] for word in listed if len(word) == 1), vocab_size)
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        for word in listed:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append(word)
        most = max((len(word) - 1 for word in listed), default=0)
        self._said: deque[int] = deque(maxlen=most)

    @property
    def changes(self) -> bool:
        """Whether any word has several tokens."""
        return bool(self._longer)

    def advance(self, token: int) -> None:
        """Remembers as many tokens as the longest word has before its last."""
        self._said.append(token)

    def write(self, mask: np.ndarray) -> None:
        """Clears the tokens that would complete a word."""
        mask &= self._always
        words = self._longer.get(self._said[-1], ()) if self._said else ()
        said = tuple(self._said) if words else ()
        for word in words:
            if said[1 - len(word) :] == word[:-1]:
                mask.view(np.uint32)[word[-1] // 32] &= ~np.uint32(1 << word[-1] % 32)

    def copy(self) -> Self:
        """Another that remembers what this one does."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._said = self._said.copy()
        return twin


def banned_words(words: Iterable[str], tokenizer: Tokenizer | None, vocab_size: int) -> BannedWords:
    """The words as the vocabulary spells them: first in a text, inside it, and behind a space."""
    if tokenizer is None:
        raise InvalidParameter("bad_words", "need a tokenizer, and the checkpoint has none")
    spelled: list[Sequence[int]] = []
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            spelled.append(tokenizer.encode(text, add_special_tokens=False))
            spelled.append(tokenizer.encode_inside(text) or [])
    return BannedWords({tuple(ids) for ids in spelled if ids}, vocab_size)
