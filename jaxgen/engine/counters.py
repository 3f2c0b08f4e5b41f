"""What a generation loop has done since it began."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Grows by each step; one thread writes, others may read.

    prompt_tokens: computed, those of preempted requests again. generation_tokens: sampled and kept.
    prefix_hits, prefix_queries: prompt tokens found in the prefix cache, and looked up there.
    last_step_seconds: from reading one step to reading the next, while there are steps.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    prefix_queries: int = 0
    last_step_seconds: float = 0.0
