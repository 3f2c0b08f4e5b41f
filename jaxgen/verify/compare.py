"""Our numbers beside the reference's: errors per prompt, and the first position that diverges."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgen.verify.recording import FLOAT32_LOGPROBS, RecordedPrompt, Recording


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What we say of a prompt: float32 logits [tokens, vocab]; greedy int32 [steps]; and the top
    five log-probabilities of each step, float32 [steps, 5].
    """

    logits: np.ndarray
    greedy: np.ndarray
    top5_logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt goes wrong first: at a position of the prompt, or at a generated step."""

    prompt: int
    position: int
    generated: bool
    detail: str

    @property
    def sentence(self) -> str:
        """For people."""
        what = "generated token" if self.generated else "position"
        return f"prompt {self.prompt}, {what} {self.position}: {self.detail}"


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt's errors. Agreement counts positions and steps; top5_error is None if unknown."""

    tokens: int
    max_abs_error: float
    mean_kl: float
    top1_agreement: float
    greedy_equal: int
    greedy_steps: int
    top5_error: float | None
    bound: float
    divergence: Divergence | None


def compare(recording: Recording, answers: Sequence[Answer]) -> list[PromptResult]:
    """One result a prompt, in order."""
    pairs = zip(recording.prompts, answers, strict=True)
    return [
        _compare_prompt(number, expected, got, recording.exact)
        for number, (expected, got) in enumerate(pairs)
    ]


def _compare_prompt(
    number: int, expected: RecordedPrompt, got: Answer, exact: bool
) -> PromptResult:
    errors = _errors(got.logits, expected.logits)
    agree = int(np.argmin(np.append(got.greedy == expected.greedy, False)))
    top5 = None
    if expected.top5_logprobs is not None:
        # Beyond the first different token the two are not about the same text.
        steps = min(agree + 1, len(expected.greedy))
        top5 = _errors(got.top5_logprobs[:steps], expected.top5_logprobs[:steps])
    return PromptResult(
        tokens=len(expected.ids),
        max_abs_error=float(errors.max()),
        mean_kl=_mean_kl(expected.logits, got.logits),
        top1_agreement=float(np.mean(expected.logits.argmax(-1) == got.logits.argmax(-1))),
        greedy_equal=agree,
        greedy_steps=len(expected.greedy),
        top5_error=None if top5 is None else float(top5.max(initial=0.0)),
        bound=expected.logit_bound,
        divergence=_divergence(number, expected, got, errors, agree, top5 if exact else None)
        if exact
        else _logit_divergence(number, expected, errors),
    )


def _errors(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """float64 [positions]: the largest abs difference of each row; not a number is infinite."""
    difference = np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max(-1)
    return np.where(np.isfinite(difference), difference, np.inf)


def _divergence(
    number: int,
    expected: RecordedPrompt,
    got: Answer,
    errors: np.ndarray,
    agree: int,
    top5: np.ndarray | None,
) -> Divergence | None:
    found = _logit_divergence(number, expected, errors)
    if found is not None:
        return found
    if top5 is not None and (beyond := np.flatnonzero(top5 > FLOAT32_LOGPROBS)).size:
        step = int(beyond[0])
        detail = f"log-probabilities are off by {top5[step]:.2e}, at most {FLOAT32_LOGPROBS:.0e}"
        return Divergence(number, step, True, detail)
    if agree < len(expected.greedy):
        detail = f"expected token {expected.greedy[agree]}, got {got.greedy[agree]}"
        return Divergence(number, agree, True, detail)
    return None


def _logit_divergence(
    number: int, expected: RecordedPrompt, errors: np.ndarray
) -> Divergence | None:
    beyond = np.flatnonzero(errors > expected.logit_bound)
    if not beyond.size:
        return None
    first = int(beyond[0])
    detail = f"logits are off by {errors[first]:.2e}, at most {expected.logit_bound:.2g}"
    return Divergence(number, first, False, detail)


def _mean_kl(expected: np.ndarray, got: np.ndarray) -> float:
    """KL divergence of ours from the reference's distribution, averaged over positions."""
    truth, ours = _log_softmax(expected), _log_softmax(got)
    value = float((np.exp(truth) * (truth - ours)).sum(-1).mean())
    return max(0.0, value) if np.isfinite(value) else float("inf")


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
