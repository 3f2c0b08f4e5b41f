"""Token ids become text piece by piece: no half characters, nothing that may yet be a stop string.

What has been handed out never has to be taken back, and all pieces together are the text of all the
ids up to the stop string, whatever the ids' boundaries are.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from jaxgen.text.tokenizer import Tokenizer


class _Spelling(Protocol):
    def add(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """The growing text of one request.

    `pieces` are what was handed out so far, `stop` is the stop string that ended it (None if none
    did). A token that ends the request (EOS, a stop id) is not to be pushed unless its text is
    wanted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        continues_text: bool = False,
    ) -> None:
        """`min_tokens`: no stop string ends within that many tokens.

        `continues_text`: the text goes on where the prompt's ended, so that a SentencePiece
        vocabulary's first space is kept (completions); otherwise it stands alone, as in decode.
        """
        self.pieces: list[str] = []
        self.stop: str | None = None
        self._stops = tuple(stop)
        self._firsts = frozenset(text[0] for text in self._stops)
        self._longest = max((len(text) - 1 for text in self._stops), default=0)
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str_in_output
        self._pushed = 0
        self._held = ""
        if tokenizer.rules is None:
            self._spelling: _Spelling = _Windowed(tokenizer, skip_special_tokens)
        else:
            self._spelling = _Bytes(tokenizer, skip_special_tokens, continues_text)
        self._add = self._spelling.add

    @property
    def text(self) -> str:
        """What was handed out so far, put together anew."""
        return "".join(self.pieces)

    @property
    def done(self) -> bool:
        """Whether a stop string has ended the text; what is pushed then is ignored."""
        return self.stop is not None

    def push(self, token_id: int) -> str:
        """Take one more token and return the text that is now certain (often "")."""
        if self.stop is not None:
            return ""
        new = self._add(token_id)
        if self._stops:
            self._pushed += 1
            return self._extend(new, last=False)
        if new:
            self.pieces.append(new)
        return new

    def finish(self) -> str:
        """Return all that was held back; an unfinished character becomes U+FFFD."""
        return "" if self.done else self._extend(self._spelling.flush(), last=True)

    def _extend(self, new: str, *, last: bool) -> str:
        if not self._held and self._firsts.isdisjoint(new):
            if new:
                self.pieces.append(new)
            return new
        old, pending = len(self._held), self._held + new
        cut = self._stop_in(pending, old) if self._pushed > self._min_tokens else None
        if cut is not None:
            kept, self._held = pending[:cut], ""
        else:
            keep = 0 if last else self._undecided(pending)
            kept, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        if kept:
            self.pieces.append(kept)
        return kept

    def _stop_in(self, pending: str, old: int) -> int | None:
        """Where to cut for the stop string that is complete first, ending behind `old`."""
        matches = []
        for stop in self._stops:
            start = pending.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        end, start, self.stop = min(matches)
        return end if self._include_stop else start

    def _undecided(self, pending: str) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        for size in range(min(self._longest, len(pending)), 0, -1):
            if any(stop.startswith(pending[-size:]) for stop in self._stops):
                return size
        return 0


class _Bytes:
    """Text of a vocabulary whose every token has bytes of its own."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, continues_text: bool) -> None:
        assert tokenizer.rules is not None
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._whole_text = tokenizer.whole_text
        self._token_bytes = tokenizer.token_bytes
        self._strip = tokenizer.rules.strip_first_space and not continues_text
        self._errors = "replace" if tokenizer.rules.byte_level else "jaxgen_replace_each_byte"
        self._begun = b""  # of a character that has not ended

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = None if self._begun else self._whole_text(token_id)
        if text is None:
            known = self._begun + self._token_bytes(token_id)
            text, used = codecs.utf_8_decode(known, self._errors, False)
            self._begun = known[used:]
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        begun, self._begun = self._begun, b""
        return begun.decode(errors=self._errors)


class _Windowed:
    """Text of any other vocabulary: decode the last few tokens with and without the new one.

    Each piece is the difference of two decodings that begin at the same token, so that what a
    decoder does at the beginning of a text (stripping, say) cancels out.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._known = 0

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._difference(last=False)

    def flush(self) -> str:
        return self._difference(last=True)

    def _difference(self, *, last: bool) -> str:
        before = self._decode(self._ids[: self._known])
        now = self._decode(self._ids)
        if not last and (len(now) <= len(before) or now.endswith("\ufffd")):
            return ""
        del self._ids[: self._known]
        self._known = len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """One U+FFFD a byte, as SentencePiece decoders do (UTF-8's own rule is one a character)."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("jaxgen_replace_each_byte", _replace_each_byte)
