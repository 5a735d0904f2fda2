"""The recorder's books: every answer ends once, failed attempts leave nothing behind, memory is bounded."""

from __future__ import annotations

import asyncio

import pytest

from services.router.fleet import Pair
from services.router.metering import RouterMetrics
from services.router.rates import WINDOW_S, Rates
from services.router.recorder import KEPT_ENDED, Recorder
from sluice.errors import PeerLost
from sluice.rpc.messages import GenerateCall, Tokens, Usage
from sluice.transfer.messages import Timings
from sluice.types import AttemptId, FinishReason, RequestId, Sampling

PAIR = Pair("d:1", "p:1")
TIMINGS = Timings(0.1, 0.2, 0.3, 0.05, 0.05, 0.7)
REQUEST = RequestId("cmpl-1")


def call(attempt: str = "a1") -> GenerateCall:
    return GenerateCall(REQUEST, AttemptId(attempt), PAIR.prefill, (5, 6), Sampling(), 1.0)


def counted(recorder: Recorder, name: str, **labels: str) -> float:
    return recorder.metrics.metrics.registry.get_sample_value(name, labels) or 0.0


def test_an_answer_is_counted_once_with_all_it_was_made_of() -> None:
    recorder = Recorder(RouterMetrics())
    with recorder.answer(REQUEST, 2) as watched:
        watched.attempt(call(), PAIR)
        watched.tokens(Tokens((1,), timings=TIMINGS))
        watched.tokens(Tokens((2, 3), 1))
        assert recorder.num_running == 1
        watched.finished(FinishReason.STOP, Usage(2, 1, 3, 1, 1, TIMINGS))
    (record,) = recorder.records()
    assert (record.outcome, record.output_tokens, record.cached_tokens) == ("stop", 3, 1)
    assert recorder.num_running == 0
    assert counted(recorder, "sluice_router_requests_total", outcome="stop") == 1
    assert counted(recorder, "sluice_router_attempts_total", outcome="stop") == 1
    assert counted(recorder, "sluice_router_output_tokens_total") == 3
    assert counted(recorder, "sluice_router_cached_tokens_total") == 1
    assert counted(recorder, "sluice_router_itl_seconds_count") == 1


def test_the_parts_add_up_to_the_routers_time_to_the_first_token() -> None:
    recorder = Recorder(RouterMetrics())
    with recorder.answer(REQUEST, 2) as watched:
        watched.attempt(call(), PAIR)
        watched.record.started_s -= 1.0  # what choosing a pair took
        watched.tokens(Tokens((1,), timings=TIMINGS))
    (record,) = recorder.records()
    assert record.ttft_s is not None
    assert sum(record.parts()) == pytest.approx(record.ttft_s)
    assert record.parts()[0] == pytest.approx(record.ttft_s - TIMINGS.ttft_s)


def test_a_failed_attempt_leaves_no_token_behind() -> None:
    recorder = Recorder(RouterMetrics())
    with recorder.answer(REQUEST, 2) as watched:
        watched.attempt(call("a1"), PAIR)
        watched.tokens(Tokens((1, 2)))
        watched.attempt_failed(PeerLost("gone"), again=True)
        watched.attempt(call("a2"), Pair("d:2", "p:1"))
        watched.tokens(Tokens((1,)))
        watched.finished(FinishReason.LENGTH)
    (record,) = recorder.records()
    assert (record.attempt_id, record.decode, record.attempts) == ("a2", "d:2", 2)
    assert record.output_tokens == 1
    assert counted(recorder, "sluice_router_retries_total", code="PeerLost") == 1
    assert counted(recorder, "sluice_router_attempts_total", outcome="PeerLost") == 1
    assert counted(recorder, "sluice_router_requests_total", outcome="length") == 1


def test_errors_and_leaving_clients_are_told_apart() -> None:
    recorder = Recorder(RouterMetrics())
    with pytest.raises(PeerLost), recorder.answer(REQUEST, 2):
        raise PeerLost("gone")
    with pytest.raises(asyncio.CancelledError), recorder.answer(REQUEST, 2):
        raise asyncio.CancelledError
    with pytest.raises(GeneratorExit), recorder.answer(REQUEST, 2):
        raise GeneratorExit
    assert [one.outcome for one in recorder.records()] == ["cancelled", "cancelled", "PeerLost"]
    assert (recorder.answers, recorder.failures) == (3, 3)


def test_memory_is_bounded() -> None:
    recorder = Recorder(RouterMetrics())
    for _ in range(3 * KEPT_ENDED):
        with recorder.answer(REQUEST, 2) as watched:
            watched.attempt(call(), PAIR)
            watched.finished(FinishReason.STOP)
    assert len(recorder.records()) == KEPT_ENDED
    assert recorder.answers == 3 * KEPT_ENDED


def test_rates_are_of_the_last_minute_only() -> None:
    now = 1000.0
    rates = Rates(lambda: now)
    for _ in range(120):
        rates.answer()
        rates.tokens(10)
        now += 1.0
    assert rates.per_second() == pytest.approx((1.0, 10.0), rel=0.05)
    now += WINDOW_S + 1
    assert rates.per_second() == (0.0, 0.0)
    rates.tokens(600)
    assert rates.per_second() == (0.0, 10.0)


def test_a_young_process_divides_by_its_age() -> None:
    now = 0.0
    rates = Rates(lambda: now)
    now = 2.0
    rates.answer()
    assert rates.per_second()[0] == 0.5
