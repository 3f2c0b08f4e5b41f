"""Log-probabilities in OpenAI's two forms, and vLLM's for prompts: what JSON can hold, always."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgen.engine.outputs import TokenLogprob
from jaxgen.text.detokenize import IncrementalDetokenizer
from jaxgen.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not know."""


class TokenNames:
    """How tokens are named: their text, or `token_id:7` where that was asked for.

    A model without tokenizer names them by their ids always, and so are those that have no text:
    most vocabularies are padded.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def name(self, token_id: int) -> str:
        """The token's own text: special tokens have theirs, half characters are U+FFFD."""
        if self._as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id) or f"token_id:{token_id}"

    def bytes(self, token_id: int) -> list[int]:
        """The token's bytes, by which pieces of characters can be told apart."""
        return list(self.tokenizer.token_bytes(token_id)) if self.tokenizer is not None else []


class CompletionLogprobs:
    """The `logprobs` of one completion, which grows token by token.

    Offsets count characters of the text before a token: what is left out of the text counts none,
    and a character that several tokens spell begins with the first of them.
    """

    def __init__(
        self, names: TokenNames, *, skip_special_tokens: bool, continues_text: bool
    ) -> None:
        """continues_text: a prompt comes before, which is not part of the text."""
        self._names = names
        self._offset = 0
        self._text = (
            None
            if names.tokenizer is None
            else IncrementalDetokenizer(
                names.tokenizer,
                skip_special_tokens=skip_special_tokens,
                continues_text=continues_text,
            )
        )

    def render(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], top: int
    ) -> dict[str, Any]:
        """The four lists for more tokens. Without an entry (a prompt's first) they hold null."""
        offsets: list[int] = []
        for token in token_ids:
            offsets.append(self._offset)
            if self._text is not None:
                self._offset += len(self._text.push(token))
        return {
            "text_offset": offsets,
            "tokens": [self._names.name(token) for token in token_ids],
            "token_logprobs": [None if e is None else finite(e.logprob) for e in entries],
            "top_logprobs": [None if e is None else self._likeliest(e, top) for e in entries],
        }

    def _likeliest(self, entry: TokenLogprob, top: int) -> dict[str, float]:
        """The likeliest and the chosen; of tokens that are spelled alike the likelier counts."""
        named: dict[str, float] = {}
        for token, logprob in (*entry.top[:top], (entry.token_id, entry.logprob)):
            name, value = self._names.name(token), finite(logprob)
            named[name] = max(named.get(name, value), value)
        return named


def chat_logprobs(names: TokenNames, entries: Sequence[TokenLogprob], top: int) -> list[dict]:
    """The `content` list of a chat choice's logprobs."""
    return [
        {
            **_chat_token(names, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(names, *pair) for pair in entry.top[:top]],
        }
        for entry in entries
    ]


def prompt_logprobs(
    names: TokenNames, entries: Sequence[TokenLogprob | None], count: int
) -> list[Mapping[str, Any] | None]:
    """vLLM's prompt_logprobs: for each position, by token id; rank is null beyond the likeliest."""
    told: list[Mapping[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            told.append(None)
            continue
        ranked: list[tuple[int, float, int | None]] = [
            (*pair, rank) for rank, pair in enumerate(entry.top[:count], start=1)
        ]
        if all(token != entry.token_id for token, _, _ in ranked):
            ranked.append((entry.token_id, entry.logprob, None))
        told.append(
            {
                str(token): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": names.name(token),
                }
                for token, logprob, rank in ranked
            }
        )
    return told


def finite(logprob: float) -> float:
    """The number, or LOWEST where it is none that JSON can hold."""
    return logprob if math.isfinite(logprob) and logprob > LOWEST else LOWEST


def _chat_token(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": names.name(token_id),
        "logprob": finite(logprob),
        "bytes": names.bytes(token_id),
    }
