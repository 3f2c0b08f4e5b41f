"""`jaxgen bench throughput`: all requests at once, offline, until the last token of the last."""

import time
from collections.abc import Sequence
from typing import Any

from jaxgen.bench.progress import Progress
from jaxgen.bench.workload import BenchRequest
from jaxgen.engine.engine import InferenceEngine
from jaxgen.engine.loop import GenerationLoop
from jaxgen.sampling import SamplingParams
from jaxgen.schedule.order import longest_first


def run_throughput(
    engine: InferenceEngine,
    requests: Sequence[BenchRequest],
    progress: list[Progress] | None = None,
) -> dict[str, Any]:
    """vLLM's keys, and output tokens per second beside them.

    Requests begin in the order in which `LLM.generate` has them begin.

    progress: gets an entry for each step.
    """
    loop = GenerationLoop(engine)
    for index in longest_first([request.output_len for request in requests]):
        request = requests[index]
        params = SamplingParams(
            temperature=0.0, max_tokens=request.output_len, ignore_eos=True, detokenize=False
        )
        loop.submit(str(index), request.prompt_ids, params)
    start, steps = time.perf_counter(), 0
    while loop.has_unfinished:
        changed = loop.step()
        steps += 1
        if progress is not None:
            progress.append(Progress(time.perf_counter() - start, len(changed), *loop.load))
    elapsed = time.perf_counter() - start
    prompt_tokens = sum(len(request.prompt_ids) for request in requests)
    output_tokens = sum(request.output_len for request in requests)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": len(requests) / elapsed,
        "tokens_per_second": (prompt_tokens + output_tokens) / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
        "num_steps": steps,
        "late_compiles": engine.runner.late_compiles,
    }
