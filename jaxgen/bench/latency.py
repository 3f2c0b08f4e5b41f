"""`jaxgen bench latency`: one batch from its prompts to its last token, and its decode steps."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxgen.bench.workload import fixed
from jaxgen.engine.cost import Ceilings, step_cost
from jaxgen.engine.engine import InferenceEngine
from jaxgen.engine.loop import GenerationLoop
from jaxgen.sampling import SamplingParams

_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class LatencyRun:
    """What one iteration took, in seconds: all of it, until the first tokens, and a decode step."""

    total: float
    prefill: float
    decode_step: float


def run_latency(
    engine: InferenceEngine,
    ceilings: Ceilings,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters_warmup: int,
    num_iters: int,
    seed: int = 0,
) -> dict[str, Any]:
    """vLLM's keys (avg_latency, latencies, percentiles); prefill and decode beside the roofline."""
    vocab = int(engine.model.config.vocab_size)
    requests = fixed(batch_size, input_len, output_len, vocab, seed)
    params = SamplingParams(
        temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
    )
    runs = []
    for iteration in range(num_iters_warmup + num_iters):
        loop = GenerationLoop(engine)
        for index, request in enumerate(requests):
            loop.submit(str(index), request.prompt_ids, params)
        run = _timed(loop, batch_size)
        if iteration >= num_iters_warmup:
            runs.append(run)
    latencies = [run.total for run in runs]
    decode = statistics.median(run.decode_step for run in runs)
    prefill = statistics.median(run.prefill for run in runs)
    context = input_len + output_len // 2
    decode_floor = step_cost(
        engine.model, tokens=batch_size, rows=batch_size, context=context
    ).seconds(ceilings)
    prefill_floor = step_cost(
        engine.model, tokens=batch_size * input_len, rows=batch_size, context=input_len
    ).seconds(ceilings)
    return {
        "avg_latency": statistics.mean(latencies),
        "latencies": latencies,
        "percentiles": {str(q): float(np.percentile(latencies, q)) for q in _PERCENTILES},
        "input_len": input_len,
        "output_len": output_len,
        "batch_size": batch_size,
        "decode_step_ms": decode * 1e3,
        "decode_roofline_ms": decode_floor * 1e3,
        "decode_roofline_share": decode_floor / decode if decode else None,
        "prefill_ms": prefill * 1e3,
        "prefill_roofline_ms": prefill_floor * 1e3,
        "prefill_roofline_share": prefill_floor / prefill,
        "late_compiles": engine.runner.late_compiles,
    }


def _timed(loop: GenerationLoop, batch_size: int) -> LatencyRun:
    """Runs until all is done. A decode step is the median gap between the reads of full batches."""
    start = time.perf_counter()
    first, marks = None, []
    while loop.has_unfinished:
        changed = loop.step()
        now = time.perf_counter()
        if changed and first is None:
            first = now
        if len(changed) == batch_size:
            marks.append(now)
    gaps = np.diff(marks)
    return LatencyRun(
        total=time.perf_counter() - start,
        prefill=(first or start) - start,
        decode_step=float(np.median(gaps)) if len(gaps) else 0.0,
    )
