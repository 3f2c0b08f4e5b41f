"""/v1/completions: request and answer."""

from typing import Any

from jaxgen.sampling import InvalidParameter
from jaxgen.serving.protocol.sampling import SamplingFields, Whole
from jaxgen.serving.protocol.service import Answer, TokenId

DEFAULT_MAX_TOKENS = 16
"""Of a completion that does not say, by leaving it out or by null."""


class CompletionRequest(SamplingFields):
    """One prompt or several, as text or as token ids."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = False
    logprobs: Whole | None = None
    max_tokens: Whole | None = DEFAULT_MAX_TOKENS
    best_of: Whole | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    def check_supported(self) -> None:
        """Also refuses what only this route knows."""
        super().check_supported()
        if self.best_of not in (None, 1):
            raise InvalidParameter("best_of", "is not supported: ask for n continuations")
        if self.suffix:
            raise InvalidParameter("suffix", "is not supported: no model here fills a gap")

    def prompts(self) -> list[str | list[int]]:
        """All prompts; InvalidParameter if there is none, or an empty one."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [[token for token in given if isinstance(token, int)]]
        several = [entry for entry in given if not isinstance(entry, int)]
        if not several or [] in several:
            raise InvalidParameter("prompt", "must not be empty")
        return several


class Usage(Answer):
    """Tokens that were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class CompletionLogprobs(Answer):
    """An entry for each token; None where nothing comes before it."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(Answer):
    """One continuation of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(Answer):
    """Continuations in the order of the prompts, n of each."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
