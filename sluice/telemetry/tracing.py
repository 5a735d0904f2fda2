"""OpenTelemetry spans, an extra (``pip install sluice[tracing]``): without an endpoint nothing of it is imported."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sluice.telemetry import traceparent

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer


class Tracing:
    """Spans of one process. The parent of a span is whatever this task's trace context says."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider

    @classmethod
    def to(cls, role: str, endpoint: str) -> Tracing:
        """Export to an OTLP/gRPC collector at ``endpoint`` (http://host:port); empty = record nothing.

        ``OTEL_*`` variables (sampler, resource, headers) work as everywhere. Raises ``ImportError`` without the extra.
        """
        if not endpoint:
            return cls()
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        insecure = not endpoint.startswith("https://")
        return cls.with_exporter(role, OTLPSpanExporter(endpoint=endpoint, insecure=insecure))

    @classmethod
    def with_exporter(cls, role: str, exporter: SpanExporter) -> Tracing:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create({"service.name": f"sluice-{role}"}))
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        return cls(provider)

    @contextmanager
    def span(self, name: str, **attributes: str | int) -> Iterator[None]:
        """Around what a task does. Calls that it makes meanwhile carry this span as their parent."""
        if self._provider is None:
            yield
            return
        from opentelemetry import trace
        from opentelemetry.trace import Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        before = traceparent.current()
        propagator = TraceContextTextMapPropagator()
        parent = propagator.extract({traceparent.KEY: before})
        span = self._tracer().start_span(name, parent, attributes=attributes)
        carrier: dict[str, str] = {}
        propagator.inject(carrier, trace.set_span_in_context(span, parent))
        traceparent.set_current(carrier.get(traceparent.KEY, ""))
        try:
            yield
        except Exception as error:
            span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
            raise
        except BaseException:  # the caller had enough, which is no failure
            span.set_attribute("sluice.cancelled", True)
            raise
        finally:
            traceparent.set_current(before)
            span.end()

    def parts(self, names: Sequence[str], seconds: Sequence[float]) -> None:
        """What has just ended, part by part: spans one after the other, the last one up to now, under this task's."""
        if self._provider is None:
            return
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({traceparent.KEY: traceparent.current()})
        began_ns = time.time_ns() - round(sum(seconds) * 1e9)
        for name, part_s in zip(names, seconds, strict=True):
            span = self._tracer().start_span(name, parent, start_time=began_ns)
            began_ns += round(part_s * 1e9)
            span.end(end_time=began_ns)

    def flush(self) -> None:
        """Send what is left and end the exporter's thread. Blocks for a few seconds at most."""
        if self._provider is not None:
            self._provider.force_flush(timeout_millis=2000)
            self._provider.shutdown()

    def _tracer(self) -> Tracer:
        assert self._provider is not None
        return self._provider.get_tracer("sluice")
