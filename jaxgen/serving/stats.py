"""What the engine tells of itself: its load at a moment, and each request's times at its end."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxgen.engine.outputs import FinishReason

if TYPE_CHECKING:
    from jaxgen.engine.engine import InferenceEngine
    from jaxgen.engine.loop import GenerationLoop


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The load now, and counters since the start.

    running, waiting: continuations that hold blocks, or wait for them. kv_used_blocks,
    kv_total_blocks: all cache groups together. prefix_hits, prefix_queries: prompt tokens found in
    the prefix cache, and looked up there. prompt_tokens, generation_tokens: computed and sampled.
    last_step_seconds: the host's time from one step's read to the next. padding_tokens: that steps
    computed to fill their shapes. corrupted: continuations that ended since their logits were not
    finite. compiled_steps, compile_seconds: programs, and the time until they were there.
    """

    running: int
    waiting: int
    kv_used_blocks: int
    kv_total_blocks: int
    prefix_hits: int
    prefix_queries: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    steps: int
    late_compiles: int
    last_step_seconds: float
    padding_tokens: int
    corrupted: int
    compiled_steps: int
    compile_seconds: float


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that has ended, for metrics. Times are `time.monotonic` seconds.

    first_scheduled, first_token: None if it ended before. generated_tokens: of all its
    continuations, longest_tokens: of the longest; finish_reasons: one for each.
    """

    request_id: str
    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    longest_tokens: int
    max_tokens: int | None
    n: int
    preemptions: int
    finish_reasons: tuple[FinishReason, ...]


def stats_of(loop: "GenerationLoop") -> EngineStats:
    """What a loop and its engine say now; any thread may ask."""
    state, runner, counters = loop.engine.state, loop.engine.runner, loop.counters
    total = sum(state.num_blocks)
    running, waiting = loop.load
    return EngineStats(
        running=running,
        waiting=waiting,
        kv_used_blocks=total - sum(state.free_blocks),
        kv_total_blocks=total,
        prefix_hits=counters.prefix_hits,
        prefix_queries=counters.prefix_queries,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        preemptions=counters.preemptions,
        steps=counters.steps,
        late_compiles=runner.late_compiles,
        last_step_seconds=counters.last_step_seconds,
        padding_tokens=counters.padding_tokens,
        corrupted=counters.corrupted,
        compiled_steps=runner.compiled_steps,
        compile_seconds=runner.compile_seconds,
    )


def cache_config_of(engine: "InferenceEngine") -> dict[str, str]:
    """How an engine's KV cache is set up, by vLLM's names.

    kv_cache_max_concurrency: sequences of the longest context that it holds at once.
    """
    config, state = engine.config, engine.state
    windows = [str(group.window) for group in state.groups if group.window is not None]
    peaks = engine.capacity.peak_blocks(state.max_context, engine.limits.max_tokens)
    pools = zip(state.num_blocks, peaks, strict=True)
    at_once = min(blocks / peak for blocks, peak in pools)
    told = {
        "block_size": state.block_size,
        "num_gpu_blocks": sum(state.num_blocks),
        "kv_cache_size_tokens": int(at_once * state.max_context),
        "kv_cache_max_concurrency": round(at_once, 2),
        "cache_dtype": config.dtype,
        "enable_prefix_caching": state.prefix_cache is not None,
        "gpu_memory_utilization": config.kv_memory.utilization,
        "sliding_window": ",".join(windows) or None,
    }
    return {name: str(value) for name, value in told.items()}
