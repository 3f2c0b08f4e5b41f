"""The messages of a chat, and what is asked of the model for the next answer."""

import argparse
from collections.abc import Sequence

from jaxgen.commands.sampling_options import sampling_params
from jaxgen.opened import OpenedModel
from jaxgen.sampling import SamplingParams
from jaxgen.text.chat_template import ChatTemplateError
from jaxgen_checkpoints.errors import RefusedInput

USUAL_TOKENS = 512
"""Tokens of an answer where --max-tokens is not given."""


class Conversation:
    """Questions and answers so far. `prompt_ids` and `params` belong to the open question."""

    prompt_ids: Sequence[int]
    params: SamplingParams

    def __init__(self, args: argparse.Namespace, opened: OpenedModel) -> None:
        """Begins with --system. RefusedInput for a model without tokenizer."""
        opened.need_tokenizer()
        self._args = args
        self._opened = opened
        self._messages: list[dict[str, str]] = []
        self._question: dict[str, str] | None = None
        if args.system is not None:
            self._messages.append({"role": "system", "content": args.system})

    def ask(self, text: str) -> None:
        """Opens a question. One that is refused, or never answered, is forgotten."""
        self._question = {"role": "user", "content": text}
        messages = [*self._messages, self._question]
        try:
            self.prompt_ids = self._opened.need_tokenizer().encode_chat(messages)
        except ChatTemplateError as error:
            raise RefusedInput(f"{self._args.model}: chat_template: {error}") from error
        self.params = sampling_params(self._args, self._opened, self.prompt_ids, USUAL_TOKENS)

    def answered(self, text: str) -> None:
        """Keeps the open question and its answer, whole or stopped."""
        assert self._question is not None
        self._messages += [self._question, {"role": "assistant", "content": text}]
        self._question = None
