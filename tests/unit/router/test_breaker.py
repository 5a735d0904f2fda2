"""A pair's circuit breaker: one table, bounded probes, and failures that don't count."""

from __future__ import annotations

import itertools

import pytest

from services.router.breaker import (
    BREAKER_TABLE,
    Breaker,
    BreakerEvent,
    BreakerState,
    BreakerTimes,
    counts_against_pair,
)
from sluice.errors import (
    Aborted,
    BadRequest,
    DeadlineExceeded,
    DigestMismatch,
    InternalError,
    LayoutRefused,
    NotReady,
    Overloaded,
    PeerLost,
    SluiceError,
    StaleEpoch,
    TransferFailed,
)

TIMES = BreakerTimes(failures=2, cool_s=1.0, max_cool_s=4.0)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker("x", TIMES)
    for _ in range(TIMES.failures):
        breaker.failed(breaker.enter(), now)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_every_move_is_in_the_table() -> None:
    moves = set(BREAKER_TABLE)
    assert len(moves) == 4
    for state, event in itertools.product(BreakerState, BreakerEvent):
        assert ((state, event) in moves) == (
            (state, event)
            in {
                (BreakerState.CLOSED, BreakerEvent.TRIPPED),
                (BreakerState.OPEN, BreakerEvent.COOLED),
                (BreakerState.HALF_OPEN, BreakerEvent.PASSED),
                (BreakerState.HALF_OPEN, BreakerEvent.FAILED),
            }
        )


def test_only_failures_in_a_row_open_it() -> None:
    breaker = Breaker("x", TIMES)
    breaker.failed(False, 0.0)
    breaker.passed(False)
    breaker.failed(False, 0.0)
    assert breaker.state is BreakerState.CLOSED
    breaker.failed(False, 0.0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.admits(0.99)
    assert breaker.opens_in_s(0.25) == 0.75


def test_half_open_lets_one_probe_through_at_a_time() -> None:
    breaker = opened()
    assert breaker.admits(1.0)
    assert breaker.enter()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.admits(100.0)
    breaker.leave(True)  # its client left: no verdict
    assert breaker.admits(1.0)
    assert breaker.enter()
    breaker.passed(True)
    breaker.leave(True)
    assert breaker.state is BreakerState.CLOSED
    assert not breaker.enter()


def test_failed_probes_double_the_pause_up_to_its_bound() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(4):
        pauses.append(breaker.opens_in_s(now))
        now += pauses[-1]
        breaker.failed(breaker.enter(), now)
        breaker.leave(True)
    assert pauses == [1.0, 2.0, 4.0, 4.0]


def test_answers_to_requests_from_before_say_nothing_about_a_probe() -> None:
    breaker = opened()
    breaker.enter()
    breaker.passed(False)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.failed(False, 1.0)
    assert breaker.state is BreakerState.HALF_OPEN


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (PeerLost("x"), True),
        (TransferFailed("x"), True),
        (DigestMismatch("x"), True),
        (InternalError("x"), True),
        (BadRequest("x"), False),
        (DeadlineExceeded("x"), False),
        (Overloaded("x"), False),
        (NotReady("x"), False),
        (StaleEpoch("x"), False),
        (LayoutRefused("x"), False),
        (Aborted("x"), False),
    ],
    ids=lambda value: value.code if isinstance(value, SluiceError) else "",
)
def test_a_client_cannot_open_a_breaker(error: SluiceError, counts: bool) -> None:
    assert counts_against_pair(error) is counts
