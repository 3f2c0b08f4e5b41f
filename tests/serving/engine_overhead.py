"""What a token costs the host: scheduler, loop, detokenizer and streams on a device that is free.

Run by hand: python tests/serving/engine_overhead.py FOLDER [--streams 256] [--tokens 300]
"""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

import numpy as np

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).parents[2] / root) for root in (".", "models", "checkpoints")]

from jaxgen.llm import LLM  # noqa: E402
from jaxgen.sampling import Sampled, SamplingParams  # noqa: E402
from jaxgen.serving.async_engine import AsyncEngine  # noqa: E402


class FreeDevice:
    """Stands for a StepRunner whose steps take no time, or `seconds`, and give any tokens."""

    late_compiles = compiled_steps = 0
    compile_seconds = 0.0

    def __init__(self, runner, vocab: int, rows: int, seconds: float) -> None:
        self.sampling_kinds = runner.sampling_kinds
        self._tokens = np.random.default_rng(0).integers(0, vocab, (64, rows), np.int32)
        self._seconds = seconds
        self._steps = 0

    def admit(self, slot, row) -> None:
        """Costs nothing."""

    def sample(self, bucket, packed, demand) -> Sampled:
        self._steps += 1
        rows = bucket.rows
        return Sampled(
            self._tokens[self._steps % 64][:rows],
            np.zeros(rows, np.float32),
            np.zeros((rows, 20), np.int32),
            np.zeros((rows, 20), np.float32),
            np.zeros(rows, bool),
        )

    def read(self, results):
        time.sleep(self._seconds)
        return results


async def measure(llm: LLM, streams: int, tokens: int) -> str:
    engine = AsyncEngine.of(llm, name="free")
    await engine.start()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    deltas = 0

    async def read(number: int) -> None:
        nonlocal deltas
        async for _ in engine.generate(str(number), [5, 6, 7 + number], params):
            deltas += 1

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*map(read, range(streams)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    await engine.stop()
    made = streams * tokens
    return (
        f"{made / wall:.0f} tokens/s, {1e6 * cpu / made:.1f} us of CPU a token, "
        f"{deltas / made:.2f} deltas a token"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=300)
    options = parser.parse_args()
    for seconds in (0.0, 0.0128):
        llm = LLM(
            options.folder,
            dtype="float32",
            max_num_seqs=options.streams,
            max_model_len=512,
            num_gpu_blocks_override=8 * options.streams,
        )
        vocab = int(llm.engine.model.config.vocab_size)
        device = FreeDevice(llm.engine.runner, vocab, options.streams, seconds)
        llm.engine.runner = device  # type: ignore[assignment]
        told = asyncio.run(measure(llm, options.streams, options.tokens))
        sys.stdout.write(f"steps of {1000 * seconds:.1f} ms: {told}\n")


if __name__ == "__main__":
    main()
