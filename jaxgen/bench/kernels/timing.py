"""The time of one call inside a compiled chain of them: neither dispatch nor the host is in it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

QUEUED, BATCHES = 6, 9


def call_seconds(
    run: Callable[[], Any], calls: int, *, queued: int = QUEUED, batches: int = BATCHES
) -> list[float]:
    """Seconds of a call in each batch of queued chains: one is prepared while another runs.

    run: starts a chain of so many calls and returns arrays that are ready when it has ended.
    """
    jax.block_until_ready(run())
    seconds = []
    for _ in range(batches):
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(queued)])
        seconds.append((time.perf_counter() - start) / calls / queued)
    return seconds


def median_call_seconds(
    run: Callable[[], Any], calls: int, *, queued: int = QUEUED, batches: int = BATCHES
) -> float:
    """The median of these."""
    return float(np.median(call_seconds(run, calls, queued=queued, batches=batches)))


@dataclass(frozen=True, slots=True)
class Chain:
    """A compiled chain of so many calls, with what it is given."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    calls: int

    def seconds(self) -> list[float]:
        """Seconds of a call in each batch."""
        return call_seconds(lambda: self.run(*self.args), self.calls)
