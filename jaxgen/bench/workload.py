"""The requests of every bench: lengths, ids and arrivals drawn from a seed, or read from a file.

What a seed gives never changes: other engines are given the same requests.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxgen_checkpoints.errors import RefusedInput

_SPECIAL_IDS = 16  # kept clear at the end of the vocabulary

# Logarithms of token counts (mean, standard deviation). With what SHAREGPT_LIMITS leave of them,
# prompts have 220 tokens on average and answers 190, as in the conversations the name speaks of.
SHAREGPT_INPUT, SHAREGPT_OUTPUT = (5.06, 1.30), (4.79, 1.00)
SHAREGPT_LIMITS = (4, 1024, 2048)
"""Fewest tokens of a prompt and of an answer, most of a prompt, and most of both together."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt and how many tokens to generate for it.

    text: what the prompt says; None where its ids were drawn. prompt_ids is empty for a text that
    nobody has encoded.
    """

    prompt_ids: list[int]
    output_len: int
    text: str | None = None


def fixed(
    num_prompts: int, input_len: int, output_len: int, vocab: int, seed: int = 0
) -> list[BenchRequest]:
    """Every prompt of one length, for a single batch."""
    rng = np.random.default_rng(seed)
    return [
        BenchRequest(_prompt_ids(rng, input_len, vocab), output_len) for _ in range(num_prompts)
    ]


def uniform(
    num_prompts: int,
    input_range: tuple[int, int],
    output_range: tuple[int, int],
    vocab: int,
    seed: int = 0,
    *,
    prefix_len: int = 0,
) -> list[BenchRequest]:
    """Lengths uniform over closed ranges; prefix_len: tokens before them that all prompts share.

    Drawn in this order: all input lengths, all output lengths, the prefix, then the ids prompt
    after prompt.
    """
    rng = np.random.default_rng(seed)
    inputs = rng.integers(input_range[0], input_range[1] + 1, size=num_prompts)
    outputs = rng.integers(output_range[0], output_range[1] + 1, size=num_prompts)
    shared = _prompt_ids(rng, prefix_len, vocab) if prefix_len else []
    return [
        BenchRequest(shared + _prompt_ids(rng, int(i), vocab), int(o))
        for i, o in zip(inputs, outputs, strict=True)
    ]


def random(
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    vocab: int,
    seed: int = 0,
    *,
    prefix_len: int = 0,
) -> list[BenchRequest]:
    """vLLM's `random`: each length uniform in [len * (1 - ratio), len * (1 + ratio)]."""
    if not 0 <= range_ratio < 1:
        raise RefusedInput(f"--random-range-ratio must lie in [0, 1), got {range_ratio}")

    def span(length: int) -> tuple[int, int]:
        low, high = np.floor(length * (1 - range_ratio)), np.ceil(length * (1 + range_ratio))
        return max(1, int(low)), max(1, int(high))

    return uniform(
        num_prompts, span(input_len), span(output_len), vocab, seed, prefix_len=prefix_len
    )


def synthetic_sharegpt(num_prompts: int, vocab: int, seed: int = 0) -> list[BenchRequest]:
    """Log-normal lengths like those of ShareGPT's conversations, drawn again where they exceed
    SHAREGPT_LIMITS. Pairs of lengths are drawn first, then the ids prompt after prompt."""
    rng = np.random.default_rng(seed)
    fewest, most_prompt, most = SHAREGPT_LIMITS
    lengths: list[tuple[int, int]] = []
    while len(lengths) < num_prompts:
        prompt = int(rng.lognormal(*SHAREGPT_INPUT))
        answer = int(rng.lognormal(*SHAREGPT_OUTPUT))
        if fewest <= prompt <= most_prompt and fewest <= answer and prompt + answer <= most:
            lengths.append((prompt, answer))
    return [BenchRequest(_prompt_ids(rng, i, vocab), o) for i, o in lengths]


def prefix_repetition(
    num_prompts: int,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
    vocab: int,
    seed: int = 0,
) -> list[BenchRequest]:
    """vLLM's dataset of the name: prefixes that equally many prompts share, in a shuffled order."""
    if num_prompts < num_prefixes:
        raise RefusedInput(
            f"--num-prompts {num_prompts} must not be fewer than "
            f"--prefix-repetition-num-prefixes {num_prefixes}"
        )
    rng = np.random.default_rng(seed)
    prefixes = [_prompt_ids(rng, prefix_len, vocab) for _ in range(num_prefixes)]
    requests = [
        BenchRequest(prefixes[i % num_prefixes] + _prompt_ids(rng, suffix_len, vocab), output_len)
        for i in range(num_prompts)
    ]
    return [requests[i] for i in rng.permutation(num_prompts)]


def custom(
    path: Path,
    num_prompts: int | None,
    output_len: int,
    encode: Callable[[str], list[int]] | None = None,
) -> list[BenchRequest]:
    """The lines of a file, {"prompt": text} with or without "output_tokens", in their order.

    num_prompts: more than there are lines begins again at the first; None: each line once.
    output_len: where a line has none. RefusedInput naming the line.
    """
    entries = _read_lines(path, output_len)
    wanted = len(entries) if num_prompts is None else num_prompts
    ids = [encode(text) if encode is not None else [] for text, _ in entries]
    lines = itertools.cycle(zip(entries, ids, strict=True))
    return [
        BenchRequest(tokens, tokens_out, text)
        for (text, tokens_out), tokens in itertools.islice(lines, wanted)
    ]


def other_ids(requests: list[BenchRequest], turn: int, vocab: int) -> list[BenchRequest]:
    """The same lengths and shared beginnings with other ids in each turn: what a server has kept of
    one is of no use to it in another. Turn 0 leaves them as they are."""
    span = vocab - _SPECIAL_IDS
    return [
        replace(request, prompt_ids=[(token + turn) % span for token in request.prompt_ids])
        for request in requests
    ]


def ramped(num_prompts: int, strategy: str, start: float, end: float) -> np.ndarray:
    """vLLM's ramp-up: requests a second at each request, from `start` at the first to `end`.

    strategy: linear, or exponential.
    """
    progress = np.linspace(0.0, 1.0, num_prompts)
    if strategy == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress


def arrivals(
    num_prompts: int, rate: float | np.ndarray, seed: int = 0, *, burstiness: float = 1.0
) -> list[float]:
    """Seconds after the first request at which each one is sent; all zero for an infinite rate.

    rate: requests a second, always the same or of each request. Gaps are gamma-distributed with
    this shape: 1 is a Poisson process, less comes in bursts, infinity at equal distances.
    """
    if np.isinf(rate).all():
        return [0.0] * num_prompts
    if np.isinf(burstiness):
        gaps = np.broadcast_to(1 / np.asarray(rate), num_prompts)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), num_prompts)
    times = np.cumsum(gaps)
    return (times - times[0]).tolist()


def _prompt_ids(rng: np.random.Generator, length: int, vocab: int) -> list[int]:
    return rng.integers(0, vocab - _SPECIAL_IDS, size=length).tolist()


def _read_lines(path: Path, output_len: int) -> list[tuple[str, int]]:
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                entries.append(_entry(json.loads(line), output_len))
            except ValueError as error:
                raise RefusedInput(f"{path} line {number}: {error}, got {line[:80]!r}") from error
    if not entries:
        raise RefusedInput(f'{path}: expected lines of {{"prompt": text}}, found none')
    return entries


def _entry(value: Any, output_len: int) -> tuple[str, int]:  # noqa: ANN401 (whatever JSON holds)
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise ValueError('expected an object with a text as "prompt"')
    tokens = value.get("output_tokens", output_len)
    if not value["prompt"]:
        raise ValueError('"prompt" must not be empty')
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ValueError(f'"output_tokens" must be a whole number from 1 on, not {tokens!r}')
    return value["prompt"], tokens
