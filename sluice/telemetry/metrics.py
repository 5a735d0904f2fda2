"""One process's metrics: what is counted as it happens, and what is read only when somebody scrapes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from sluice.telemetry.catalogue import Kind, Metric

OTHER = "other"
Check = Callable[[], str]
"""What is wrong, in a sentence; empty: nothing."""


@dataclass(frozen=True)
class Sample:
    """One value of a lazily read metric; ``labels`` in the order of its declaration."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


Read = Callable[[], Iterable[Sample]]


class Metrics:
    """A registry of its own. Counting is cheap and thread-safe; a metric may be asked for only once."""

    def __init__(self) -> None:
        disable_created_metrics()  # a second series for each counter, which nobody asks for
        self.registry = CollectorRegistry()

    def counter(self, metric: Metric) -> Counter:
        _expect(metric, Kind.COUNTER)
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def gauge(self, metric: Metric) -> Gauge:
        _expect(metric, Kind.GAUGE)
        return Gauge(metric.name, metric.help, metric.labels, registry=self.registry)

    def histogram(self, metric: Metric) -> Histogram:
        _expect(metric, Kind.HISTOGRAM)
        return Histogram(
            metric.name,
            metric.help,
            metric.labels,
            registry=self.registry,
            buckets=metric.buckets,
        )

    def lazily(self, metrics: tuple[Metric, ...], read: Read) -> None:
        """``read`` is called at each scrape, perhaps on another thread, for values of ``metrics``."""
        self.registry.register(_Lazy(metrics, read))

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """What a scrape gets, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class BoundedLabel:
    """The first ``limit`` different values as they are, every later one as "other"."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._seen:
            if len(self._seen) >= self._limit:
                return OTHER
            self._seen.add(value)
        return value


class MetricsServer:
    """``GET /metrics`` on a port and a thread of its own, so that a busy event loop can't hide what it is busy with.

    A path of ``checks`` answers 200 when its check finds nothing wrong, else 503 with the sentence.
    """

    def __init__(
        self, metrics: Metrics, host: str, port: int, checks: Mapping[str, Check] | None = None
    ) -> None:
        """Port 0 takes a free one. Raises ``OSError`` when the address is taken or not ours."""
        self._checks = checks or {}
        self._server: WSGIServer
        self._thread: threading.Thread
        self._server, self._thread = start_http_server(port, host, metrics.registry)
        self._exposition = self._server.get_app()
        self._server.set_app(self._answer)
        self.address = f"{host}:{self._server.server_port}"

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        check = self._checks.get(environ["PATH_INFO"])
        if check is None:
            return self._exposition(environ, start) if self._exposition is not None else ()
        wrong = check()
        start(
            "503 Service Unavailable" if wrong else "200 OK",
            [("Content-Type", "text/plain; charset=utf-8")],
        )
        return (f"{wrong or 'ok'}\n".encode(),)

    def close(self) -> None:
        """Blocks until the thread has ended."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Lazy(Collector):
    def __init__(self, metrics: tuple[Metric, ...], read: Read) -> None:
        self._metrics = metrics
        self._read = read

    def collect(self) -> Iterator[Family]:
        families = {metric.name: _family(metric) for metric in self._metrics}
        for sample in self._read():
            families[sample.metric.name].add_metric(sample.labels, sample.value)
        yield from families.values()

    def describe(self) -> Iterator[Family]:
        """Without this the registry would call ``read`` before what it reads is there."""
        return iter([_family(metric) for metric in self._metrics])


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    assert metric.kind is not Kind.HISTOGRAM, "histograms are counted as things happen"
    family = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    return family(metric.name, metric.help, labels=metric.labels)


def _expect(metric: Metric, kind: Kind) -> None:
    assert metric.kind is kind, f"{metric.name} is a {metric.kind.value}"
