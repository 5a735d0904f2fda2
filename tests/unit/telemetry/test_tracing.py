"""Spans over real gRPC, with the right parents; and nothing of OpenTelemetry where nobody asked for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sluice.rpc.client import DecodeClient
from sluice.rpc.convert_decode import event_to_pb, generate_from_pb
from sluice.rpc.messages import Finished, GenerateCall, Tokens, Usage
from sluice.rpc.server import RpcServer, ServerConfig
from sluice.telemetry import traceparent
from sluice.telemetry.tracing import Tracing
from sluice.types import AttemptId, FinishReason, RequestId, Sampling
from sluice.v1 import decode_pb2, decode_pb2_grpc

CALL = GenerateCall(RequestId("r"), AttemptId("a"), "p:1", (1, 2), Sampling(), 5.0)


class TracedDecode(decode_pb2_grpc.DecodeServicer):
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def Generate(  # type: ignore[override]
        self, request: decode_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        call = generate_from_pb(request)
        with self._tracing.span("decode.generate", attempt=call.attempt_id):
            self._tracing.parts(("queue", "prefill"), (0.25, 0.5))
            yield event_to_pb(Tokens((1,)))
            yield event_to_pb(Finished(FinishReason.STOP, Usage(2, 0, 1)))


async def one_request(router: Tracing, decode: Tracing) -> None:
    server = RpcServer(
        ServerConfig(drain_s=0.1),
        lambda grpc: decode_pb2_grpc.add_DecodeServicer_to_server(TracedDecode(decode), grpc),
        ("sluice.v1.Decode",),
    )
    await server.start()
    try:
        async with DecodeClient(server.address) as client:
            with router.span("router.answer"), router.span("router.attempt"):
                async for _ in client.generate(CALL):
                    pass
    finally:
        await server.stop()


def spans_of(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_one_trace_over_the_wire_with_the_right_parents() -> None:
    here, there = InMemorySpanExporter(), InMemorySpanExporter()
    router = Tracing.with_exporter("router", here)
    decode = Tracing.with_exporter("decode", there)
    asyncio.run(one_request(router, decode))
    router.flush()
    decode.flush()
    spans = spans_of(here) | spans_of(there)
    assert len({span.context.trace_id for span in spans.values()}) == 1

    def parent(name: str) -> str:
        span = spans[name].parent
        assert span is not None
        return next(n for n, one in spans.items() if one.context.span_id == span.span_id)

    assert spans["router.answer"].parent is None
    assert parent("router.attempt") == "router.answer"
    assert parent("decode.generate") == "router.attempt"
    assert parent("queue") == parent("prefill") == "decode.generate"
    queue, prefill = spans["queue"], spans["prefill"]
    assert queue.end_time == prefill.start_time
    assert (prefill.end_time or 0) - (queue.start_time or 0) == 750_000_000
    assert spans["decode.generate"].resource.attributes["service.name"] == "sluice-decode"
    assert spans["decode.generate"].attributes == {"attempt": "a"}


def test_a_failure_is_marked_and_a_caller_who_leaves_is_not() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing.with_exporter("router", exporter)
    with pytest.raises(ValueError, match="no"), tracing.span("failed"):
        raise ValueError("no")
    with pytest.raises(GeneratorExit), tracing.span("left"):
        raise GeneratorExit
    tracing.flush()
    spans = spans_of(exporter)
    assert not spans["failed"].status.is_ok
    assert spans["left"].status.is_unset
    assert traceparent.current() == ""


def test_a_clients_own_trace_goes_on_and_nonsense_begins_a_new_one() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing.with_exporter("router", exporter)
    theirs = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for value, name in ((theirs, "theirs"), ("rubbish", "ours"), ("x" * 9999, "also ours")):
        traceparent.set_current(value)
        with tracing.span(name):
            pass
    traceparent.set_current("")
    tracing.flush()
    spans = spans_of(exporter)
    assert spans["theirs"].context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert spans["ours"].parent is None
    assert spans["also ours"].parent is None


def test_off_it_records_nothing_and_passes_the_context_on() -> None:
    exporter = InMemorySpanExporter()
    decode = Tracing.with_exporter("decode", exporter)
    asyncio.run(one_request(Tracing(), decode))
    decode.flush()
    assert spans_of(exporter)["decode.generate"].parent is None


def test_nothing_of_it_is_imported_where_it_is_off() -> None:
    """FastAPI imports the API by itself where it is installed; the SDK and the exporter are ours to leave alone."""
    code = (
        "import sys; import services.tracing, services.router.__main__\n"
        "from sluice.telemetry.tracing import Tracing\n"
        "tracing = Tracing.to('router', '')\n"
        "with tracing.span('x'): tracing.parts(('a',), (1.0,))\n"
        "tracing.flush()\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exp'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
