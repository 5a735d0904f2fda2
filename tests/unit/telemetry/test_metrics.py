"""Counting, reading lazily, bounded labels, and a port of its own that is gone when closed."""

from __future__ import annotations

import socket
import threading
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.telemetry.catalogue import CANARY_RUNS, ITL, POD_READY, POD_STEPS
from sluice.telemetry.metrics import OTHER, BoundedLabel, Metrics, MetricsServer, Sample


def values(text: str) -> dict[str, float]:
    """``name{label values}`` to value."""
    return {
        sample.name + str(sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_is_counted_and_what_is_read_are_exported_together() -> None:
    metrics = Metrics()
    metrics.counter(CANARY_RUNS).labels("passed").inc()
    metrics.histogram(ITL).observe(0.003)
    steps = 7.0
    metrics.lazily(
        (POD_READY, POD_STEPS),
        lambda: [Sample(POD_READY, 1, ("decode",)), Sample(POD_STEPS, steps, ("decode",))],
    )
    steps = 8.0
    body, content_type = metrics.exposition()
    seen = values(body.decode())
    assert content_type.startswith("text/plain")
    assert seen["sluice_decode_canary_runs_total['passed']"] == 1
    assert seen["sluice_pod_steps_total['decode']"] == 8, "read at the scrape, not before"
    assert seen["sluice_decode_itl_seconds_bucket['0.005']"] == 1
    assert not any("created" in name for name in seen)


def test_a_metric_is_made_once() -> None:
    metrics = Metrics()
    metrics.counter(CANARY_RUNS)
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.counter(CANARY_RUNS)


def test_a_peer_that_makes_names_up_cannot_grow_the_registry() -> None:
    bounded = BoundedLabel(limit=3)
    assert [bounded(f"field{i}") for i in range(5)] == ["field0", "field1", "field2", OTHER, OTHER]
    assert bounded("field1") == "field1"


def test_the_server_takes_a_free_port_and_leaves_nothing_behind() -> None:
    metrics = Metrics()
    metrics.counter(CANARY_RUNS).labels("passed").inc()
    before = threading.active_count()
    server = MetricsServer(metrics, "127.0.0.1", 0)
    with urlopen(f"http://{server.address}/metrics", timeout=5) as answer:
        assert "sluice_decode_canary_runs_total" in answer.read().decode()
    server.close()
    assert threading.active_count() == before
    host, port = server.address.split(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0


def test_checks_answer_beside_the_metrics() -> None:
    wrong = {"/ready": "no peer has agreed"}
    checks = {path: lambda path=path: wrong.get(path, "") for path in ("/live", "/ready")}
    server = MetricsServer(Metrics(), "127.0.0.1", 0, checks)
    try:
        with urlopen(f"http://{server.address}/live", timeout=5) as answer:
            assert answer.read() == b"ok\n"
        with pytest.raises(HTTPError, match="503") as refused:
            urlopen(f"http://{server.address}/ready", timeout=5)
        assert refused.value.read() == b"no peer has agreed\n"
        refused.value.close()
        wrong.clear()
        with urlopen(f"http://{server.address}/ready", timeout=5) as answer:
            assert answer.status == 200
    finally:
        server.close()


def test_a_taken_port_is_an_error_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        MetricsServer(Metrics(), "127.0.0.1", taken.getsockname()[1])


def test_a_broken_reader_fails_the_scrape_and_not_the_server() -> None:
    metrics = Metrics()

    def read() -> list[Sample]:
        raise RuntimeError("gone")

    metrics.lazily((POD_READY,), read)
    server = MetricsServer(metrics, "127.0.0.1", 0)
    try:
        for _ in range(2):
            with pytest.raises(HTTPError, match="500"):
                urlopen(f"http://{server.address}/metrics", timeout=5)
    finally:
        server.close()
