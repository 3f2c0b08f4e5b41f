"""The fixed request sets: lengths and ids drawn from a seed, the same for every engine compared."""

from dataclasses import dataclass

import numpy as np

from jaxgen_checkpoints.errors import RefusedInput

_SPECIAL_IDS = 16  # kept clear at the end of the vocabulary


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt and how many tokens to generate for it."""

    prompt_ids: list[int]
    output_len: int


def fixed(
    num_prompts: int, input_len: int, output_len: int, vocab: int, seed: int = 0
) -> list[BenchRequest]:
    """Every prompt of one length: [BenchRequest]. Dataset `random` without a range."""
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
) -> list[BenchRequest]:
    """Lengths uniform over closed ranges. Drawn in this order: all input lengths, all output
    lengths, then the ids prompt after prompt."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(input_range[0], input_range[1] + 1, size=num_prompts)
    outputs = rng.integers(output_range[0], output_range[1] + 1, size=num_prompts)
    return [
        BenchRequest(_prompt_ids(rng, int(i), vocab), int(o))
        for i, o in zip(inputs, outputs, strict=True)
    ]


def random(
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    vocab: int,
    seed: int = 0,
) -> list[BenchRequest]:
    """vLLM's `random`: each length uniform in [len * (1 - ratio), len * (1 + ratio)]."""
    if not 0 <= range_ratio < 1:
        raise RefusedInput(f"--random-range-ratio must lie in [0, 1), got {range_ratio}")

    def span(length: int) -> tuple[int, int]:
        spread = int(length * range_ratio)
        return max(1, length - spread), max(1, length + spread)

    return uniform(num_prompts, span(input_len), span(output_len), vocab, seed)


def _prompt_ids(rng: np.random.Generator, length: int, vocab: int) -> list[int]:
    return rng.integers(0, vocab - _SPECIAL_IDS, size=length).tolist()
