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
    return {
        f"{sample.name}{{{','.join(sample.labels.values())}}}": sample.value
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
