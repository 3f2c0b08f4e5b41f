"""`jaxgen bench startup`: from a checkpoint to the first token, stage by stage."""

import time
from collections.abc import Callable
from typing import Any

from jaxgen.engine.engine import InferenceEngine
from jaxgen.engine.loop import GenerationLoop
from jaxgen.sampling import SamplingParams


def run_startup(
    make_engine: Callable[[], InferenceEngine], *, prompt_len: int = 16
) -> dict[str, Any]:
    """Seconds until the weights are loaded, until every step is compiled, until a first token."""
    start = time.perf_counter()
    engine = make_engine()
    loaded = time.perf_counter()
    engine.warm_up()
    warm = time.perf_counter()
    loop = GenerationLoop(engine)
    loop.submit("0", list(range(prompt_len)), SamplingParams(temperature=0.0, max_tokens=1))
    while loop.has_unfinished:
        loop.step()
    done = time.perf_counter()
    steps = len(list(engine.buckets))
    return {
        "load_seconds": loaded - start,
        "warm_up_seconds": warm - loaded,
        "first_token_seconds": done - warm,
        "total_seconds": done - start,
        "num_layers": int(engine.model.config.num_layers),
        "num_steps_compiled": steps,
        "warm_up_seconds_per_step": (warm - loaded) / steps,
        "late_compiles": engine.runner.late_compiles,
    }
