"""What a live stack says of itself: one pair that agreed, one that was refused, and a router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from services.router.page.schema import Answer, Status
from sluice.telemetry.catalogue import BY_ROLE
from tests.e2e.pods import Pair, Pod, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(240)]

SECRET = "Behold the wheelbarrow"


@dataclass
class Stack:
    pair: Pair
    refused: Pod
    router: Pod

    @property
    def url(self) -> str:
        return f"http://{self.router.address}"

    def ask(self, **body: object) -> httpx.Response:
        chosen = {"prompt": SECRET, "max_tokens": 12, "ignore_eos": True, **body}
        return httpx.post(self.url + "/v1/completions", json=chosen, timeout=60, trust_env=False)

    def status(self) -> Status:
        answer = httpx.get(self.url + "/status.json", timeout=10, trust_env=False)
        return Status.model_validate_json(answer.text)

    def answer(self, client_id: str) -> Answer:
        """Of the only prompt of a body, by the id that the client got: the prompt's number follows it."""
        mine = f"{client_id}-0"
        (found,) = [one for one in self.status().answers if one.request_id == mine]
        return found

    def until(self, holds: object, what: str, timeout_s: float = 20.0) -> None:
        async def look() -> bool:
            try:
                return bool(holds())  # type: ignore[operator]
            except httpx.HTTPError:
                return False

        asyncio.run(eventually(look, timeout_s, what, every_s=0.2))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OpenTelemetry collector that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._server = grpc.server(ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(  # the name is gRPC's
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(grace=1).wait()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, collector: Collector
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    pair = Pair.create(
        folder / "pair", model_dir, metrics_listen="127.0.0.1:0", otlp_endpoint=collector.url
    )
    refused = Pod(
        "prefill", {"model_dir": str(model_dir), "page_tokens": "256"}, folder / "refused.log"
    )
    peers = f"{pair.prefill.address},{refused.address}"
    pair.decode.settings = {**pair.decode.settings, "peers": peers}
    settings = {"model_dir": str(model_dir), "decodes": pair.decode.address}
    settings["otlp_endpoint"] = collector.url
    router = Pod("router", settings, folder / "router.log")
    stack = Stack(pair, refused, router)
    pods = (pair.prefill, pair.decode, refused, router)
    for pod in pods:
        pod.start()
    try:
        stack.until(
            lambda: {one.state for one in stack.status().pairs} == {"agreed", "refused"},
            "one pair agreed, one refused",
            90.0,
        )
        yield stack
    finally:
        for pod in pods:
            pod.kill()


def events_of(pod: Pod) -> list[dict[str, object]]:
    return [json.loads(line) for line in pod.log_file.read_text().splitlines() if line[:1] == "{"]


def metrics_of(text: str) -> dict[str, float]:
    """Values by name and label values, these in the order of their labels' names."""
    return {
        f"{sample.name}{{{','.join(sample.labels[key] for key in sorted(sample.labels))}}}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(pod: Pod) -> str:
    """Over the port that the pod's log names."""
    (address,) = (one["address"] for one in events_of(pod) if one["event"] == "metrics_listening")
    with urlopen(f"http://{address}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def test_one_attempt_can_be_followed_through_three_logs(stack: Stack) -> None:
    answer = stack.answer(stack.ask().json()["id"])
    request_id, attempt_id = answer.request_id, answer.attempt_id
    pods = {"router": stack.router, "decode": stack.pair.decode, "prefill": stack.pair.prefill}
    for role, pod in pods.items():
        mine = [line for line in events_of(pod) if line.get("attempt_id") == attempt_id]
        names = [line["event"] for line in mine]
        assert names[0] == "attempt_started", role
        assert len(names) >= 2, f"{role} says how it ended: {names}"
        assert {line["role"] for line in mine} == {role}
        assert {line["request_id"] for line in mine} == {request_id}, role
        assert SECRET not in pod.log_file.read_text(), role


def test_a_requests_spans_add_up_to_what_the_router_measured(stack: Stack) -> None:
    answer = stack.answer(stack.ask(max_tokens=20).json()["id"])
    to_first = {span.part: span.seconds for span in answer.spans if span.part != "decode"}
    assert answer.ttft_s is not None
    assert sum(to_first.values()) == pytest.approx(answer.ttft_s, abs=1e-6)
    assert min(to_first.values()) >= 0
    assert min(to_first["prefill"], to_first["transfer"], to_first["adopt"]) > 0
    assert answer.outcome == "length"
    assert answer.output_tokens == 20
    assert answer.acceptance_tokens is not None
    assert 1 <= answer.acceptance_tokens <= 4


def test_every_metric_of_the_catalogue_is_exported_by_its_role(stack: Stack) -> None:
    stack.ask()
    texts = {
        "router": httpx.get(stack.url + "/metrics", trust_env=False).text,
        "decode": scrape(stack.pair.decode),
        "prefill": scrape(stack.pair.prefill),
    }
    for role, text in texts.items():
        declared = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
        expected = {metric.name for metric in BY_ROLE[role]}
        assert {name for name in declared if name.startswith("sluice_")} == expected, role
    decode, prefill = metrics_of(texts["decode"]), metrics_of(texts["prefill"])
    assert decode["sluice_pod_ready{decode}"] == 1
    assert decode["sluice_pod_refusals_total{geometry.page_tokens,decode}"] == 1
    assert decode["sluice_decode_peers{refused}"] == 1
    pages = ["free", "held", "quarantined", "cached"]
    assert sum(decode[f"sluice_pod_items{{decode,PAGE,{state}}}"] for state in pages) == 1024
    sent = {name: value for name, value in prefill.items() if "transferred" in name}
    for name, value in sent.items():
        assert decode[name.replace("prefill", "decode")] == value > 0, "sent and proven received"
    parts = sum(v for n, v in decode.items() if n.startswith("sluice_decode_ttft_part_seconds_sum"))
    assert parts == pytest.approx(decode["sluice_decode_ttft_seconds_sum{}"], abs=1e-6)


def test_one_request_is_one_trace_over_three_processes(stack: Stack, collector: Collector) -> None:
    answer = stack.answer(stack.ask().json()["id"])
    request_id = answer.request_id

    def of(span: Span, key: str) -> str:
        return next((a.value.string_value for a in span.attributes if a.key == key), "")

    def trace() -> dict[str, Span]:
        roots = [s for s in collector.spans if of(s, "sluice.request_id") == request_id]
        ids = {span.trace_id for span in roots}
        return {span.name: span for span in collector.spans if span.trace_id in ids}

    names = {"router.answer", "router.attempt", "decode.generate", "prefill.run", "adopt"}
    stack.until(lambda: names <= trace().keys(), f"spans {names} exported", 30.0)
    spans = trace()
    assert len({span.trace_id for span in spans.values()}) == 1
    by_id = {span.span_id: name for name, span in spans.items()}
    parents = {name: by_id.get(span.parent_span_id, "") for name, span in spans.items()}
    assert parents["router.answer"] == ""
    assert parents["router.attempt"] == "router.answer"
    assert parents["decode.generate"] == "router.attempt"
    assert parents["prefill.run"] == "decode.generate"
    assert parents["adopt"] == "decode.generate"
    assert of(spans["prefill.run"], "sluice.attempt_id") == answer.attempt_id
