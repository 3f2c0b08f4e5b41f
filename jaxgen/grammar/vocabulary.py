"""A tokenizer as llguidance wants it: the bytes of every token, and how to spell forced bytes."""

from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from jaxgen.sampling import InvalidParameter
from jaxgen.sampling.structured import NAME
from jaxgen.text.tokenizer import Tokenizer


def guided_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary of `vocab_size` ids, of which eos_ids may come where a grammar is satisfied.

    InvalidParameter where tokens have no bytes of their own.
    """
    if tokenizer.rules is None:
        message = "need a tokenizer whose tokens are bytes: BPE or SentencePiece"
        raise InvalidParameter(NAME, message)
    ends = [token for token in eos_ids if 0 <= token < vocab_size]
    # A model that has no end gets one beyond its vocabulary, which is never sampled.
    spelling = _Spelling(tokenizer, vocab_size, ends or [vocab_size])
    return LLTokenizer(TokenizerWrapper(spelling), eos_token=ends or [vocab_size])


class _Spelling:
    """The attributes and the call that llguidance's wrapper asks for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        if max(ends) >= vocab_size:
            self.tokens.append(b"<end>")
        self.special_token_ids = sorted({*tokenizer.special_ids, *ends})
        specials = set(self.special_token_ids)
        self._by_bytes = {
            spelled: token
            for token, spelled in enumerate(self.tokens)
            if spelled and token not in specials
        }
        self._longest = max(map(len, self._by_bytes), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids whose bytes are exactly the text's."""
        wanted = text.encode() if isinstance(text, str) else text
        try:
            ids = self._tokenizer.encode_inside(wanted.decode())
        except UnicodeDecodeError:
            ids = None
        return self._longest_first(wanted) if ids is None else ids

    def _longest_first(self, wanted: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(wanted):
            for size in range(min(self._longest, len(wanted) - start), 0, -1):
                token = self._by_bytes.get(wanted[start : start + size])
                if token is not None:
                    ids.append(token)
                    start += size
                    break
            else:
                return ids  # the vocabulary cannot spell it: the grammar is told where it ends
        return ids
