"""The metrics that are read from the engine at the moment of a scrape."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxgen.engine.counters import Tally

if TYPE_CHECKING:
    from jaxgen.serving.async_engine import AsyncEngine

_LABELS = ("model_name", "engine")


class EngineNow(Collector):
    """The engine's own numbers, and the tallies that are filled too often for a lock each time."""

    def __init__(
        self, engine: "AsyncEngine", prefix: str, labels: tuple[str, str], between: Tally
    ) -> None:
        """labels: model_name and engine. between: seconds between what one stream is given."""
        self._engine = engine
        self._prefix = prefix
        self._label_values = labels
        self._between = between

    def collect(self) -> Iterator[Metric]:
        """One family a number."""
        for name, (told, value) in self._gauges().items():
            gauge = GaugeMetricFamily(f"{self._prefix}:{name}", told, labels=_LABELS)
            gauge.add_metric(self._label_values, value)
            yield gauge
        for name, (told, value) in self._counters().items():
            counter = CounterMetricFamily(f"{self._prefix}:{name}", told, labels=_LABELS)
            counter.add_metric(self._label_values, value)
            yield counter
        yield self._by_reason()
        yield self._by_source()
        yield self._cache_config()
        yield self._sleep_state()
        told = "Between what one stream is given"
        yield self._histogram("inter_token_latency_seconds", told, self._between)
        told = "Of each step: a prompt's that it computes, and those that it samples"
        yield self._histogram("iteration_tokens_total", told, self._engine.step_tokens)

    def _gauges(self) -> Mapping[str, tuple[str, float]]:
        stats = self._engine.stats()
        return {
            "num_requests_running": ("Continuations that hold KV blocks", stats.running),
            "num_requests_waiting": ("Continuations that wait for KV blocks", stats.waiting),
            "kv_cache_usage_perc": (
                "Share of the KV blocks in use, 0 to 1",
                stats.kv_used_blocks / max(1, stats.kv_total_blocks),
            ),
            "kv_cache_total_blocks": ("KV blocks, used and free", stats.kv_total_blocks),
            "last_step_seconds": ("The host's time from step to step", stats.last_step_seconds),
            "compiled_steps": ("Programs of steps, by shape and kind", stats.compiled_steps),
            "compile_seconds": ("Of the warm-up", stats.compile_seconds),
        }

    def _counters(self) -> Mapping[str, tuple[str, float]]:
        stats = self._engine.stats()
        return {
            "prompt_tokens": (
                "Prompt tokens computed, or found in the cache",
                stats.prompt_tokens + stats.prefix_hits,
            ),
            "generation_tokens": ("Tokens generated", stats.generation_tokens),
            "padding_tokens": ("Computed to fill the shapes of steps", stats.padding_tokens),
            "prefix_cache_queries": ("Tokens looked up in the cache", stats.prefix_queries),
            "prefix_cache_hits": ("Tokens found in the cache", stats.prefix_hits),
            "num_preemptions": ("Continuations put back to be recomputed", stats.preemptions),
            "corrupted_requests": ("Continuations whose logits were not finite", stats.corrupted),
            "steps": ("Steps of the engine", stats.steps),
            "late_compiles": ("Steps compiled after the warm-up", stats.late_compiles),
        }

    def _by_reason(self) -> Metric:
        told, waiting = "Continuations that wait, by what for", self._engine.stats().waiting
        deferred = min(waiting, self._engine.waiting_deferred)
        name = f"{self._prefix}:num_requests_waiting_by_reason"
        family = GaugeMetricFamily(name, told, labels=(*_LABELS, "reason"))
        family.add_metric((*self._label_values, "capacity"), waiting - deferred)
        family.add_metric((*self._label_values, "deferred"), deferred)
        return family

    def _by_source(self) -> Metric:
        stats, name = self._engine.stats(), f"{self._prefix}:prompt_tokens_by_source"
        told = "Prompt tokens, by where their keys came from"
        family = CounterMetricFamily(name, told, labels=(*_LABELS, "source"))
        family.add_metric((*self._label_values, "local_compute"), stats.prompt_tokens)
        family.add_metric((*self._label_values, "local_cache_hit"), stats.prefix_hits)
        return family

    def _sleep_state(self) -> Metric:
        name, told = f"{self._prefix}:engine_sleep_state", "It never sleeps: awake is 1"
        family = GaugeMetricFamily(name, told, labels=(*_LABELS, "sleep_state"))
        for state in ("awake", "weights_offloaded", "discard_all"):
            family.add_metric((*self._label_values, state), state == "awake")
        return family

    def _cache_config(self) -> Metric:
        config = self._engine.cache_config()
        name, told = f"{self._prefix}:cache_config_info", "How the KV cache is set up; always 1"
        family = GaugeMetricFamily(name, told, labels=(*_LABELS, *config))
        family.add_metric((*self._label_values, *config.values()), 1)
        return family

    def _histogram(self, name: str, told: str, tally: Tally) -> Metric:
        counts, total = list(tally.counts), tally.total
        limits = [*map(floatToGoString, tally.bounds), "+Inf"]
        family = HistogramMetricFamily(f"{self._prefix}:{name}", told, labels=_LABELS)
        buckets = list(zip(limits, accumulate(counts), strict=True))
        family.add_metric(self._label_values, buckets, total)
        return family
