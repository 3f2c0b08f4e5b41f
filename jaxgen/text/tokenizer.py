"""Text to token ids and back, whatever kind of file the vocabulary came from."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from jaxgen.text.chat_template import ChatTemplate
from jaxgen.text.decoders import text_rules
from jaxgen_checkpoints.errors import CheckpointWarning, RefusedInput

_GUARD = "\x02"
"""A character that merges with nothing: what follows it is spelled as in the middle of a text."""


class Tokenizer:
    """A vocabulary, its special tokens and its chat template.

    `special_tokens` is like {"bos_token": "<s>"}; `special_ids` are what skip_special_tokens leaves
    out; `rules` say how tokens spell bytes (None: not token by token); `chat_template` is
    None if there is none; `token_bytes(id)` are the bytes one token stands for (b"" if unknown),
    `whole_text(id)` the same as text, None where they are not whole characters.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        chat_template: ChatTemplate | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`add_bos`, `add_eos`: as a config says explicitly; None leaves that end to `backend`.

        `vocab_size` is the model's: a larger tokenizer is warned of, and text that needs the ids
        beyond is refused.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        self.special_tokens = {
            name: token
            for name, token in (special_tokens or {}).items()
            if backend.token_to_id(token) is not None
        }
        backend.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in self._unmarked()]
        )
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        self.pad_id = self._special_id("pad_token")
        if add_bos is not None or add_eos is not None:
            self._surround(add_bos, add_eos)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.rules = text_rules(backend)
        self.size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = self.size if vocab_size is None else vocab_size
        if self.size > self.vocab_size:
            warnings.warn(
                f"the tokenizer has {self.size} ids, the model only vocab_size = "
                f"{self.vocab_size}: text that needs the ids beyond will be refused",
                CheckpointWarning,
                stacklevel=3,
            )
        self.token_bytes = functools.cache(self._token_bytes)
        self.whole_text = functools.cache(self._whole_text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written in the text become their ids.

        Rendered chats already hold their special tokens: encode them with add_special_tokens=False.
        Raises RefusedInput for text that is not Unicode, and for ids that the model does not have.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RefusedInput(f"the text is not valid Unicode: {error}") from None
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if self.size > self.vocab_size and max(ids, default=0) >= self.vocab_size:
            beyond = next(token for token in ids if token >= self.vocab_size)
            message = (
                f"the text needs token {beyond} ({self._backend.id_to_token(beyond)!r}), but the "
                f"model's vocabulary ends at {self.vocab_size}: use the model's own tokenizer"
            )
            raise RefusedInput(message)
        return ids

    def encode_inside(self, text: str) -> list[int] | None:
        """Token ids of `text` as it is spelled in the middle of a text: with exactly its bytes.

        No special tokens, and no space that a vocabulary puts in front. None where there are none.
        """
        for guard in ("", _GUARD):
            try:
                ids = self.encode(guard + text, add_special_tokens=False)
            except RefusedInput:
                return None
            before = b""
            while guard and ids and not before.endswith(guard.encode()):
                before += self.token_bytes(ids.pop(0))
            spelled = b"".join(map(self.token_bytes, ids))
            if spelled == text.encode() and self.special_ids.isdisjoint(ids):
                return ids
        return None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`, as transformers decodes a BPE vocabulary; unknown ids have no text."""
        known = [token for token in ids if 0 <= token < self.size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        **options: Any,  # noqa: ANN401
    ) -> list[int]:
        """Token ids of a conversation; `options` as in ChatTemplate.render."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        **options: Any,  # noqa: ANN401
    ) -> str:
        """The text of a conversation; `options` as in ChatTemplate.render."""
        if self.chat_template is None:
            message = (
                "the checkpoint has no chat template: give one, or send the prompt as plain text"
            )
            raise RefusedInput(message)
        return self.chat_template.render(messages, **options)

    def token_to_id(self, token: str) -> int | None:
        """The id of one vocabulary entry, spelled as in the vocabulary; None if there is none."""
        return self._backend.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """One token alone as text; bytes that are no character by themselves are U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.size else None
        if token is None:
            return b""
        return self.decode([token_id]).encode() if self.rules is None else self.rules.spell(token)

    def _whole_text(self, token_id: int) -> str | None:
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

    def _unmarked(self) -> list[str]:
        """Named special tokens that the vocabulary holds as ordinary words."""
        added = self._backend.get_added_tokens_decoder().values()
        marked = {entry.content for entry in added if entry.special}
        return [
            token for token in dict.fromkeys(self.special_tokens.values()) if token not in marked
        ]

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _surround(self, add_bos: bool | None, add_eos: bool | None) -> None:
        """Put BOS in front and EOS behind, instead of what the vocabulary's file does by itself;
        None keeps what it does at that end.
        """
        begin, end = self.special_tokens.get("bos_token"), self.special_tokens.get("eos_token")
        sample = self._backend.encode("a")
        ends = [
            token if put else None
            for token, put in zip(sample.tokens, sample.special_tokens_mask, strict=True)
        ]
        add_bos = ends[:1] == [begin] if add_bos is None else add_bos
        add_eos = ends[-1:] == [end] if add_eos is None else add_eos
        front = [begin] if add_bos and begin is not None else []
        back = [end] if add_eos and end is not None else []
        self._backend.post_processor = TemplateProcessing(
            single=[*front, "$A", *back],
            pair=[*front, "$A", *back, *front, "$B:1", *back],
            special_tokens=[(token, self._backend.token_to_id(token)) for token in {*front, *back}],
        )
