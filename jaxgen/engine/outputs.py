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

    text is empty where nothing detokenises. stop_reason: the stop string or stop token id that
    ended it; None after EOS or at full length. error: what went wrong, if finish_reason is ERROR.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its continuations."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def finished(self) -> bool:
        """Whether every continuation has ended."""
        return all(output.finish_reason is not None for output in self.outputs)
