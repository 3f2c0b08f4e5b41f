"""Golden checkpoints with their numbers, engines over them, a loop that leaves no trace."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxgen.engine.build import build_hf_engine
from jaxgen.engine.engine import InferenceEngine
from jaxgen.engine.loop import GenerationLoop
from jaxgen.engine.outputs import RequestOutput
from jaxgen.llm import LLM
from jaxgen.ragged.buckets import Buckets
from jaxgen.sampling import SamplingParams
from jaxgen.schedule.scheduler import Scheduler

NEW_TOKENS = 24


@dataclass(frozen=True)
class Golden:
    """One fixture: its folder, and per prompt the ids, logits [len, vocab] and continuation.

    greedy: [24]; top_ids, top_logprobs: [24, 5]; the truth of generation with a cache.
    """

    folder: Path
    prompts: list[list[int]]
    logits: list[np.ndarray]
    greedy: list[list[int]]
    top_ids: list[np.ndarray] | None
    top_logprobs: list[np.ndarray] | None


def read_golden(folder: Path) -> Golden:
    with np.load(folder / "expected.npz") as arrays:
        stored = dict(arrays)
    numbers = range(sum(name.startswith("logits_") for name in stored))
    # Where the two ways of generation differ, the top five are those of recomputation.
    cached = any(name.startswith("cached_greedy_") for name in stored)
    return Golden(
        folder,
        prompts=[stored[f"prompt_{i}"].tolist() for i in numbers],
        logits=[stored[f"logits_{i}"] for i in numbers],
        greedy=[stored.get(f"cached_greedy_{i}", stored[f"greedy_{i}"]).tolist() for i in numbers],
        top_ids=None if cached else [stored[f"greedy_top5_ids_{i}"] for i in numbers],
        top_logprobs=None if cached else [stored[f"greedy_top5_logprobs_{i}"] for i in numbers],
    )


@pytest.fixture(scope="session")
def golden(golden_dir) -> Callable[[str], Golden]:
    """`golden("qwen3")`: the fixture's numbers."""
    return functools.cache(lambda name: read_golden(golden_dir(name)))


@pytest.fixture(scope="session")
def one_shape() -> Callable[..., InferenceEngine]:
    """An engine whose every step has one shape, so that one compile of each kind serves a test."""

    def build(folder: Path, **options: Any) -> InferenceEngine:
        given = {
            "dtype": "float32",
            "max_num_seqs": 6,
            "max_num_batched_tokens": 64,
            "block_size": 8,
            "max_model_len": 96,
            "num_gpu_blocks_override": 72,
        }
        engine = build_hf_engine(folder, {**given, **options})
        shape = engine.buckets.mixed[-1]
        engine.buckets = Buckets((shape,), (shape,))
        return engine

    return build


@pytest.fixture(scope="session")
def one_shape_llm() -> Callable[..., LLM]:
    """As one_shape, with a tokenizer: 4 sequences, steps of 32 tokens, 40 blocks of 8."""

    def build(folder: Path, **options: Any) -> LLM:
        given = {
            "dtype": "float32",
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "block_size": 8,
            "max_model_len": 64,
            "num_gpu_blocks_override": 40,
        }
        llm = LLM(folder, {**given, **options})
        shape = llm.engine.buckets.mixed[-1]
        llm.engine.buckets = Buckets((shape,), (shape,))
        return llm

    return build


def run(
    engine: InferenceEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    **options: Any,
) -> list[RequestOutput]:
    """Serves the prompts together; every block, slot and sequence is free again afterwards."""
    loop = GenerationLoop(engine, **options)
    before = (engine.free_blocks, len(engine.state), engine.state.free_slots)
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    outputs = [
        loop.submit(str(number), prompt, asked)
        for number, (prompt, asked) in enumerate(zip(prompts, many, strict=True))
    ]
    while loop.has_unfinished:
        loop.step()
        engine.state.check()
    assert (engine.free_blocks, len(engine.state), engine.state.free_slots) == before
    return outputs


@pytest.fixture(scope="session")
def generate() -> Callable[..., list[RequestOutput]]:
    """`generate(engine, prompts, params, **loop options)`: see `run`."""
    return run


@pytest.fixture(scope="session")
def tokens(generate) -> Callable[..., list[list[int]]]:
    """`tokens(engine, prompts, new=24)`: greedy continuations of prompts served together."""

    def continuations(engine, prompts, new: int = NEW_TOKENS) -> list[list[int]]:
        asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        return [output.outputs[0].token_ids for output in generate(engine, prompts, asked)]

    return continuations


@pytest.fixture(scope="session")
def take_every_block() -> Callable[[InferenceEngine], list[int]]:
    """Sequences, as a user of `put` may have them, that hold all free blocks; to be flushed."""

    def take(engine: InferenceEngine) -> list[int]:
        hogs: list[int] = []
        while (spare := min(*engine.free_blocks, engine.state.max_blocks)) > 0:
            hogs.append(len(hogs))
            engine.state.track(hogs[-1])
            engine.state.reserve(hogs[-1], spare * engine.state.block_size)
        return hogs

    return take


@pytest.fixture
def preempted(monkeypatch) -> list[int]:
    """Grows by the uid of every request that is preempted."""
    seen: list[int] = []
    begin_step = Scheduler.begin_step

    def watched(scheduler: Scheduler):
        step = begin_step(scheduler)
        seen.extend(request.uid for request in step.preempted)
        return step

    monkeypatch.setattr(Scheduler, "begin_step", watched)
    return seen
