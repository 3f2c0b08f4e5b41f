"""`jaxgen bench host`: what a step costs the host, on a device that costs nothing.

The real scheduler, packer, loop and detokeniser serve decodes; the stub gives every row a token at
once. What is left is the time that a real device would have to hide.
"""

import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from jaxgen.config import EngineConfig
from jaxgen.engine.engine import InferenceEngine
from jaxgen.engine.loop import GenerationLoop
from jaxgen.ragged.batch import pack_rows
from jaxgen.ragged.buckets import Bucket, Buckets
from jaxgen.ragged.prefix_cache import PrefixCache
from jaxgen.ragged.sequence import CacheGroup
from jaxgen.ragged.state import StateManager
from jaxgen.sampling import Demand, Sampled, SamplingParams, SlotRow
from jaxgen.schedule.request import Request
from jaxgen.schedule.scheduler import Scheduler
from jaxgen.text.tokenizer import Tokenizer

VOCAB = 32_000
BLOCK_SIZE = 64


class StubRunner:
    """A device that costs nothing: each row draws a token that was drawn before it was asked."""

    late_compiles = compiled_steps = 0
    compile_seconds = 0.0

    def __init__(self, rows: int, seed: int) -> None:
        """rows: of the largest batch."""
        draws = np.random.default_rng(seed).integers(0, VOCAB, rows).astype(np.int32)
        on_host: dict[str, Any] = {
            "tokens": draws,
            "logprobs": np.zeros(rows, np.float32),
            "top_ids": np.zeros((rows, 0), np.int32),
            "top_logprobs": np.zeros((rows, 0), np.float32),
            "bad": np.zeros(rows, bool),
        }
        self._sampled = Sampled(**on_host)

    def admit(self, slot: int, row: SlotRow) -> None:
        """As StepRunner."""

    def sample(self, bucket: Bucket, packed: np.ndarray, demand: Demand) -> Sampled:
        """As StepRunner."""
        return self._sampled

    def read[T](self, results: T) -> T:
        """As StepRunner."""
        return results

    def reset(self) -> None:
        """As StepRunner."""


def stub_engine(sequences: int, longest: int, seed: int) -> InferenceEngine:
    """An engine for that many sequences of at most `longest` tokens, over a stub."""
    tokens = max(2048, sequences)
    config = EngineConfig(max_num_seqs=sequences, max_num_batched_tokens=tokens, seed=seed)
    blocks = -(-longest // BLOCK_SIZE)
    groups = (CacheGroup(),)
    model: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB, recompute_at=None))
    runner: Any = StubRunner(sequences, seed)
    return InferenceEngine(
        model,
        config,
        state=StateManager(
            groups,
            (sequences * (blocks + 1),),
            block_size=BLOCK_SIZE,
            max_context=longest,
            max_tracked=sequences,
            prefix_cache=PrefixCache(groups, BLOCK_SIZE),
        ),
        runner=runner,
        buckets=Buckets.for_limits(max_tokens=tokens, max_rows=sequences, max_blocks=blocks),
        save=lambda folder: None,
    )


def stub_tokenizer() -> Tokenizer:
    """A byte-level vocabulary: all bytes, then words of three letters, with a space and without."""
    space, letters = "\u0120", "abcdefghijklmnopqrstuvwxyz"
    words = (
        f"{begin}{a}{b}{c}"
        for begin in (space, "")
        for a in letters
        for b in letters
        for c in letters
    )
    vocab = {byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}
    while len(vocab) < VOCAB:
        vocab[next(words)] = len(vocab)
    backend = tokenizers.Tokenizer(BPE(vocab, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    return Tokenizer(backend)


def run_host(sequences: int, input_len: int, output_len: int, seed: int = 0) -> dict[str, Any]:
    """Milliseconds of a decode step of `sequences` rows: whole, and scheduler and packer alone.

    Medians; the least is what an otherwise idle core takes.
    """
    whole = _loop_seconds(sequences, input_len, output_len, seed)
    planned = _schedule_seconds(sequences, input_len, output_len, seed)
    step = statistics.median(whole)
    return {
        "sequences": sequences,
        "steps": len(whole),
        "step_ms": 1e3 * step,
        "step_min_ms": 1e3 * min(whole),
        "step_p99_ms": 1e3 * float(np.percentile(whole, 99)),
        "schedule_and_pack_ms": 1e3 * statistics.median(planned),
        "us_per_token": 1e6 * step / sequences,
        "tokens_per_second": sequences / step,
    }


def _prompts(sequences: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, VOCAB, (sequences, length)).tolist()


def _loop_seconds(sequences: int, input_len: int, output_len: int, seed: int) -> list[float]:
    """Each step of the generation loop in which all sequences decode, text included."""
    engine = stub_engine(sequences, input_len + output_len, seed)
    loop = GenerationLoop(engine, stub_tokenizer())
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    for number, prompt in enumerate(_prompts(sequences, input_len, seed)):
        loop.submit(str(number), prompt, params)
    seconds = []
    while loop.has_unfinished:
        begun = time.perf_counter()
        changed = loop.step()
        if len(changed) == sequences:
            seconds.append(time.perf_counter() - begun)
    return seconds


def _schedule_seconds(sequences: int, input_len: int, output_len: int, seed: int) -> list[float]:
    """Each such step of the scheduler and the packer alone."""
    engine = stub_engine(sequences, input_len + output_len, seed)
    scheduler = Scheduler(engine.limits, engine.state)
    for number, prompt in enumerate(_prompts(sequences, input_len, seed)):
        scheduler.submit(Request(number, prompt, max_tokens=output_len))
    seconds = []
    while scheduler.unfinished:
        begun = time.perf_counter()
        plan = scheduler.begin_step()
        pack_rows(engine.buckets.fit(plan.counts), scheduler.rows, engine.state)
        scheduler.dispatched(plan)
        taken = time.perf_counter() - begun
        if len(plan.decodes) == sequences:
            seconds.append(taken)
        for chunk in plan.chunks:
            if chunk.emit:
                scheduler.receive(chunk.request, 1)
    return seconds
