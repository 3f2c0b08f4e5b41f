"""What the front process counts itself: HTTP responses, and how each replica fares."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from jaxgen.serving.replicas.fleet import Fleet
from jaxgen.serving.replicas.replica import State


class FrontMetrics:
    """The front's own part of /metrics."""

    def __init__(self, fleet: Fleet, prefix: str) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._registry.register(_Replicas(fleet, prefix))
        self._http = Counter(
            "http_requests",
            "HTTP requests",
            ("method", "handler", "status"),
            registry=self._registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "To the end of the response",
            ("method", "handler"),
            registry=self._registry,
        )

    def http(self, method: str, handler: str, status: int, seconds: float) -> None:
        """An HTTP response has ended. handler: the route's path, not the client's."""
        self._http.labels(method, handler, f"{status // 100}xx").inc()
        self._http_seconds.labels(method, handler).observe(seconds)

    def text(self) -> str:
        """In Prometheus' text format."""
        return generate_latest(self._registry).decode()


class _Replicas(Collector):
    def __init__(self, fleet: Fleet, prefix: str) -> None:
        self._fleet = fleet
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """One family a number, one sample a replica."""
        up = GaugeMetricFamily(
            f"{self._prefix}:replica_up", "Whether it is given requests", labels=("engine",)
        )
        held = GaugeMetricFamily(
            f"{self._prefix}:replica_outstanding", "Prompts it has now", labels=("engine",)
        )
        served = CounterMetricFamily(
            f"{self._prefix}:replica_requests", "Requests it has answered", labels=("engine",)
        )
        failed = CounterMetricFamily(
            f"{self._prefix}:replica_failures", "Requests that broke off", labels=("engine",)
        )
        for replica in self._fleet.replicas:
            name = (replica.name,)
            up.add_metric(name, float(replica.state is State.READY))
            held.add_metric(name, replica.outstanding)
            served.add_metric(name, replica.served)
            failed.add_metric(name, replica.failed)
        yield from (up, held, served, failed)
