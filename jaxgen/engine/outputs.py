"""What generation gives back: one RequestOutput a prompt, one CompletionOutput a sample of it."""

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a completion ended: OpenAI's two words, and what they have no word for."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position: the chosen token's log-probability, and the likeliest tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class CompletionOutput:
    """One continuation.

    pieces: of its text, as tokens made them certain; none where nothing detokenises. stop_reason:
    the stop string or stop token id that ended it; None after EOS or at full length. error: what
    went wrong, if finish_reason is ERROR. refused: that was what the request asked for.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    refused: bool = False
    _text: str = field(default="", init=False, repr=False, compare=False)
    _joined: int = field(default=0, init=False, repr=False, compare=False)

    @property
    def text(self) -> str:
        """All of its text so far, put together when it is asked for: it may be long."""
        if self._joined < len(self.pieces):
            self._text += "".join(self.pieces[self._joined :])
            self._joined = len(self.pieces)
        return self._text


@dataclass(slots=True)
class RequestTimes:
    """When things happened to a request, in the caller's clock's seconds; None if they did not.

    preemptions: how often a continuation had to give up its blocks.
    """

    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its continuations.

    prompt_logprobs: an entry for each prompt token so far, None for the first; None if not asked
    for. cached_tokens: of the prompt, found in the prefix cache. max_tokens: of each continuation.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    max_tokens: int | None = None
    times: RequestTimes = field(default_factory=RequestTimes, compare=False)

    @property
    def finished(self) -> bool:
        """Whether every continuation has ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether some of the prompt's logprobs are asked for and still to come."""
        known = self.prompt_logprobs
        return known is not None and len(known) < len(self.prompt_token_ids) and not self.finished
