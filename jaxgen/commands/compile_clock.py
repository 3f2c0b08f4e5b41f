"""How much of a stretch of time went into tracing, lowering and compiling, as JAX reports it."""

import time
from typing import Self

import jax.monitoring

_COMPILING = "/jax/core/compile/"


class CompileClock:
    """Collects the spans in which JAX was compiling while the `with` block runs.

    Tracing nests and threads overlap, so spans are merged before they are added up.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        """Starts listening."""
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *exc: object) -> None:
        """Stops listening."""
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def seconds(self, start: float, stop: float) -> float:
        """Seconds of compiling between two readings of time.perf_counter()."""
        total, reached = 0.0, start
        for begin, end in sorted(self._spans):
            begin, end = max(begin, reached), min(end, stop)
            if end > begin:
                total += end - begin
                reached = end
        return total

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith(_COMPILING):
            now = time.perf_counter()
            self._spans.append((now - duration_secs, now))
