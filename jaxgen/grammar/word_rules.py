"""Rules over token ids alone: ids that may come at all, and words that may not be completed."""

from collections.abc import Iterable, Sequence

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


class BannedWords:
    """A word's last token may not come where its other tokens came just before."""

    ended = False

    def __init__(self, words: Iterable[Sequence[int]], vocab_size: int) -> None:
        """words: token ids of each, at least one."""
        listed = [tuple(word) for word in words]
        self._always = ~packed((word[0] for word in listed if len(word) == 1), vocab_size)
        self._longer = [word for word in listed if len(word) > 1]
        self._said: list[int] = []
        self._most = max((len(word) - 1 for word in self._longer), default=0)

    @property
    def changes(self) -> bool:
        """Whether any word has several tokens."""
        return bool(self._longer)

    def advance(self, token: int) -> None:
        """Remembers as many tokens as the longest word has before its last."""
        self._said = [*self._said, token][-self._most :]

    def write(self, mask: np.ndarray) -> None:
        """Clears the tokens that would complete a word."""
        mask &= self._always
        for word in self._longer:
            if tuple(self._said[1 - len(word) :]) == word[:-1]:
                mask.view(np.uint32)[word[-1] // 32] &= ~np.uint32(1 << word[-1] % 32)


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
