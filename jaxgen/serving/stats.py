"""What the engine tells of itself: its load at a moment, and each request's times at its end."""

from dataclasses import dataclass

from jaxgen.engine.outputs import FinishReason


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The load now, and counters since the start.

    running, waiting: continuations that hold blocks, or wait for them. kv_used_blocks,
    kv_total_blocks: all cache groups together. prefix_hits, prefix_queries: prompt tokens found in
    the prefix cache, and looked up there. prompt_tokens, generation_tokens: computed and sampled.
    last_step_seconds: the host's time from one step's read to the next.
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


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that has ended, for metrics. Times are `time.monotonic` seconds.

    first_scheduled, first_token: None if it ended before. generated_tokens: of all its
    continuations; finish_reasons: one for each.
    """

    request_id: str
    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    max_tokens: int | None
    n: int
    preemptions: int
    finish_reasons: tuple[FinishReason, ...]
