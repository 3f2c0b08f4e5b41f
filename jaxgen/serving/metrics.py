"""Prometheus metrics by vLLM's names and buckets, behind a prefix of our own.

What belongs to one request is observed once, when it has ended; everything else is read from the
engine when it is asked for.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from jaxgen.engine.counters import Tally
from jaxgen.engine.outputs import FinishReason
from jaxgen.serving.metrics_now import EngineNow
from jaxgen.serving.stats import FinishedRequest

if TYPE_CHECKING:
    from jaxgen.serving.async_engine import AsyncEngine

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
N_BUCKETS = (1, 2, 5, 10, 20)

_SECONDS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token", "first"),
    "request_time_per_output_token_seconds": ("Of each request's tokens but the first", "between"),
    "e2e_request_latency_seconds": ("From a request's arrival to its end", "request"),
    "request_queue_time_seconds": ("From a request's arrival to its first step", "request"),
    "request_inference_time_seconds": ("From its first step to its end", "request"),
    "request_prefill_time_seconds": ("From its first step to its first token", "request"),
    "request_decode_time_seconds": ("From its first token to its end", "request"),
}
_BUCKETS = {
    "first": FIRST_TOKEN_BUCKETS,
    "between": BETWEEN_TOKENS_BUCKETS,
    "request": REQUEST_BUCKETS,
}
_TOKENS = {
    "request_prompt_tokens": "Of each prompt",
    "request_generation_tokens": "Generated for each request",
    "request_max_num_generation_tokens": "Of each request's longest continuation",
    "request_params_max_tokens": "max_tokens of each request",
    "request_prefill_kv_computed_tokens": "Of each prompt, not found in the prefix cache",
}
_LABELS = ("model_name", "engine")


class Metrics:
    """Everything that /metrics tells, and what feeds it."""

    def __init__(self, engine: "AsyncEngine", model_name: str, prefix: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        between = Tally(BETWEEN_TOKENS_BUCKETS)
        self.registry.register(EngineNow(engine, prefix, (model_name, "0"), between))
        labels = (model_name, "0")
        tokens = token_buckets(engine.max_context)
        histograms: dict[str, tuple[str, Sequence[float]]] = {
            name: (told, _BUCKETS[of]) for name, (told, of) in _SECONDS.items()
        }
        histograms |= {name: (told, tokens) for name, told in _TOKENS.items()}
        histograms["request_params_n"] = ("n of each request", N_BUCKETS)
        histograms["request_num_preemptions"] = ("Of each request", (0, *N_BUCKETS))
        self._histograms = {
            name: Histogram(
                f"{prefix}:{name}", told, _LABELS, buckets=buckets, registry=self.registry
            ).labels(*labels)
            for name, (told, buckets) in histograms.items()
        }
        self._cached = Counter(
            f"{prefix}:prompt_tokens_cached",
            "Prompt tokens found in the prefix cache",
            _LABELS,
            registry=self.registry,
        ).labels(*labels)
        self._rejected = Counter(
            f"{prefix}:admission_rejections",
            "Requests refused because too many wait",
            _LABELS,
            registry=self.registry,
        ).labels(*labels)
        self._ended = Counter(
            f"{prefix}:request_success",
            "Continuations that have ended, by reason",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        for reason in FinishReason:  # a rate needs to see a counter's beginning
            self._ended.labels(*labels, str(reason))
        self._labels = labels
        self._http = Counter(
            "http_requests",
            "HTTP requests",
            ("method", "handler", "status"),
            registry=self.registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "To the end of the response",
            ("method", "handler"),
            registry=self.registry,
        )
        self.between_tokens = between.observe

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def rejected(self) -> None:
        """A request was refused because too many wait."""
        self._rejected.inc()

    def http(self, method: str, handler: str, status: int, seconds: float) -> None:
        """An HTTP response has ended. handler: the route's path, not the client's."""
        self._http.labels(method, handler, f"{status // 100}xx").inc()
        self._http_seconds.labels(method, handler).observe(seconds)

    def finished(self, request: FinishedRequest) -> None:
        """Observes a request that has ended; may be called from the engine's thread."""
        seconds: dict[str, float] = {
            "e2e_request_latency_seconds": request.finished - request.arrival,
            "request_prompt_tokens": request.prompt_tokens,
            "request_generation_tokens": request.generated_tokens,
            "request_max_num_generation_tokens": request.longest_tokens,
            "request_prefill_kv_computed_tokens": request.prompt_tokens - request.cached_tokens,
            "request_params_n": request.n,
            "request_num_preemptions": request.preemptions,
        }
        if request.max_tokens is not None:
            seconds["request_params_max_tokens"] = request.max_tokens
        if request.first_scheduled is not None:
            seconds["request_queue_time_seconds"] = request.first_scheduled - request.arrival
            seconds["request_inference_time_seconds"] = request.finished - request.first_scheduled
        if request.first_scheduled is not None and request.first_token is not None:
            decode = request.finished - request.first_token
            seconds["time_to_first_token_seconds"] = request.first_token - request.arrival
            seconds["request_prefill_time_seconds"] = request.first_token - request.first_scheduled
            seconds["request_decode_time_seconds"] = decode
            later = request.generated_tokens / request.n - 1
            if later > 0:
                seconds["request_time_per_output_token_seconds"] = decode / later
        for name, value in seconds.items():
            self._histograms[name].observe(value)
        self._cached.inc(request.cached_tokens)
        for reason in request.finish_reasons:
            self._ended.labels(*self._labels, str(reason)).inc()


def token_buckets(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `longest`."""
    buckets = []
    decade = 1
    while decade <= longest:
        buckets += [decade * digit for digit in (1, 2, 5) if decade * digit <= longest]
        decade *= 10
    return tuple(buckets)
