"""What a reference says of a few prompts: logits, greedy tokens, and how exact we have to be."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FLOAT32_LOGITS = 2e-4
FLOAT32_LOGPROBS = 1e-4
"""Bounds of max abs errors in float32; docs/decisions/0008 says why."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedPrompt:
    """One prompt.

    ids: int32 [tokens]. logits: float32 [tokens, vocab]. greedy: int32 [steps], the truth of cached
    generation. top5_logprobs: float32 [steps, 5], best first; None where none belong to `greedy`.
    logit_bound: the max abs error of a logit that passes.
    """

    ids: np.ndarray
    logits: np.ndarray
    greedy: np.ndarray
    top5_logprobs: np.ndarray | None
    logit_bound: float

    def until(self, position: int, *, generated: bool) -> np.ndarray:
        """int32 ids: the prompt, and where a generated position is meant all tokens before it."""
        return np.concatenate([self.ids, self.greedy[: position if generated else 0]])


@dataclass(frozen=True, slots=True)
class Recording:
    """A reference's answers. exact: greedy tokens and log-probabilities must agree as well.

    They need not in a narrow type, where a near tie may fall to either side.
    """

    description: str
    prompts: Sequence[RecordedPrompt]
    exact: bool

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and continuation together."""
        return max(len(prompt.ids) + len(prompt.greedy) for prompt in self.prompts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(prompt.ids) for prompt in self.prompts)
