"""The status document: what it says of pods, pairs and answers, and that nothing odd breaks it."""

from __future__ import annotations

from dataclasses import replace

from services.discovery.registry import PodState
from services.router.fleet import FleetView, Pair, PairView, PodView
from services.router.metering import RouterMetrics
from services.router.page.status import status_of
from services.router.recorder import Recorder
from sluice.rpc.messages import (
    Acceptance,
    CanaryStatus,
    DecodeStatus,
    PeerStatus,
    PoolStatus,
    PrefillStatus,
)
from sluice.transfer.messages import Moved
from sluice.types import Epoch, RequestId, Role

POOL = PoolStatus("PAGE", 10, 4, 3, 2, 1)
PREFILL = PrefillStatus(Epoch("pe"), True, "", 1, 2, 1, 2, (POOL,))
CANARY = CanaryStatus(0.0, 0.5, "", "cma/memory", (Moved("target.c4", 4, 4000, b"", 0.002),))
AGREED = PeerStatus("p:1", "pe", "agreed", canary=CANARY, prefill=PREFILL)
REFUSED = PeerStatus("p:2", "qe", "refused", "1 fatal difference: geometry.page_tokens")
DECODE = DecodeStatus(Epoch("de"), True, "", 0, 1, 100, (AGREED, REFUSED), (POOL,))


def pod(role: Role, address: str, status: DecodeStatus | None = None, problem: str = "") -> PodView:
    return PodView(role, address, "", PodState.READY, 0, 0, 32, problem, status)


def fleet(status: DecodeStatus | None = DECODE, problem: str = "") -> FleetView:
    return FleetView(
        version=1,
        problem="",
        pods=(
            pod(Role.DECODE, "d:1", status, problem),
            pod(Role.PREFILL, "p:1"),
            pod(Role.PREFILL, "p:2"),
        ),
        pairs=(
            PairView(Pair("d:1", "p:1", digest="dg"), "agreed", problem, not problem, "closed", 1),
            PairView(Pair("d:1", "p:2"), "refused", "why", False, "closed", 0),
        ),
        waiting=3,
        in_flight=1,
    )


def recorder() -> Recorder:
    return Recorder(RouterMetrics())


def test_pods_pairs_and_totals() -> None:
    status = status_of("m", fleet(), recorder())
    by_address = {one.address: one for one in status.pods}
    assert by_address["p:1"].ready
    assert by_address["p:1"].queued == 1, "as decode heard it with its last ping"
    assert [pool.cached for pool in by_address["p:1"].pools] == [1]
    assert not by_address["p:2"].ready
    assert "geometry.page_tokens" in by_address["p:2"].reason
    agreed, refused = status.pairs
    assert agreed.canary is not None
    assert agreed.canary.transport == "cma/memory"
    assert agreed.canary.components[0].bytes_per_s == 2e6
    assert refused.reason == REFUSED.reason, "decode's own words, not the router's summary"
    assert status.totals.waiting == 3
    assert status.ready
    assert status.alarms == []


def test_what_is_wrong_is_said_in_sentences() -> None:
    peer = replace(AGREED, quarantined_attempts=2, canary=replace(CANARY, failure="too slow"))
    bad = replace(DECODE, peers=(peer,), acceptance=Acceptance(True, 1.02, 500, True))
    alarms = " ".join(status_of("m", fleet(bad), recorder()).alarms)
    assert "Acceptance collapsed on d:1: 1.02 tokens" in alarms
    assert "too slow" in alarms
    assert "2 attempts are quarantined on d:1" in alarms


def test_a_fleet_that_is_gone_is_not_ready() -> None:
    status = status_of("m", fleet(None, "connection refused"), recorder())
    assert not status.ready
    assert status.alarms[0].startswith("No pair can serve")
    assert {one.address: one.reason for one in status.pods}["d:1"] == "connection refused"
    empty = FleetView(version=0, problem="no API server", pods=(), pairs=(), waiting=0, in_flight=0)
    assert "no API server" in " ".join(status_of("m", empty, recorder()).alarms)


def test_an_answer_that_has_no_token_yet_waits() -> None:
    books = recorder()
    with books.answer(RequestId("cmpl-1"), 7):
        (answer,) = status_of("m", fleet(), books).answers
    assert [span.part for span in answer.spans] == ["waiting"]
    assert answer.ttft_s is None
    assert answer.acceptance_tokens is None
