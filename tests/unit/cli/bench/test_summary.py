"""Figures of a load against hand-counted ones: percentiles, omission, errors, goodput."""

from __future__ import annotations

import pytest

from sluice.cli.bench.summary import Slo, Spread, spread, summarise
from tests.unit.cli.bench.samples import sample


def test_percentiles_are_values_that_were_measured() -> None:
    assert spread([None, *range(100, 0, -1)]) == Spread(100, 50.5, 50, 90, 95, 99, 100)
    assert spread([3.0]) == Spread(1, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0)
    assert spread([1.0, 2.0, 3.0]) == Spread(3, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0)
    assert spread([None]) is None


def test_times_of_one_request() -> None:
    one = sample(2.0, 2.5, 2.7, 3.3, tokens=9, sent=2.1, end=3.4)
    assert one.ttft_s == pytest.approx(0.5)  # from when it was due, not from when it was sent
    assert one.e2e_s == pytest.approx(1.4)
    assert one.tpot_s == pytest.approx(0.8 / 8)  # speculation: three chunks, nine tokens
    assert one.gaps_s == pytest.approx((0.2, 0.6))
    assert sample(0.0, 1.0, tokens=5).tpot_s is None
    assert sample(0.0).ttft_s is None


def test_a_stall_of_the_server_is_seen_by_all_who_were_due_in_it() -> None:
    """Ten due a second, the server stalls a second: p50 shows it. From sending times only one would."""
    stalled = [sample(i / 10, 1.0 + i / 100, sent=0.99 + i / 100) for i in range(10)]
    s = summarise(stalled, Slo(ttft_s=0.2))
    assert s.ttft is not None
    assert s.ttft.p50 == pytest.approx(0.55)
    assert s.good == 1
    assert s.send_lag is not None
    assert s.send_lag.max == pytest.approx(0.99)


def test_failed_requests_are_in_no_latency_but_against_the_slo() -> None:
    samples = [
        sample(0.0, 0.1, 0.2),
        sample(0.0, 0.3, 0.4),
        sample(0.0, 0.001, error="cut short", end=1.0),  # quick, but not whole
        sample(1.0, error="429 Overloaded", end=1.001),
        sample(1.0, error="429 Overloaded", end=2.0),
    ]
    s = summarise(samples, Slo(ttft_s=0.2))
    assert (s.requests, s.ok) == (5, 2)
    assert s.errors == (("429 Overloaded", 2), ("cut short", 1))
    assert s.ttft is not None
    assert (s.ttft.count, s.ttft.max) == (2, 0.3)
    assert (s.good, s.good_share) == (1, 0.2)
    assert s.goodput == pytest.approx(0.5)  # one in two seconds
    assert s.request_rate == pytest.approx(1.0)
    assert s.output_tokens == 4
    assert s.output_tokens_rate == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 2),
        (Slo(ttft_s=0.15), 1),
        (Slo(tpot_s=0.15), 1),
        (Slo(e2e_s=0.35), 1),
        (Slo(ttft_s=0.15, tpot_s=0.15), 0),
    ],
)
def test_every_limit_of_an_slo_counts(slo: Slo, good: int) -> None:
    samples = [sample(0.0, 0.1, 0.3, tokens=2), sample(0.0, 0.3, 0.4, tokens=2)]
    assert summarise(samples, slo).good == good


def test_acceptance_and_cache_are_of_tokens_not_of_requests() -> None:
    samples = [
        sample(0.0, 1.0, cached=0, steps=1, accepted=3, prompt=10),
        sample(0.0, 1.0, cached=60, steps=9, accepted=0, prompt=90),
        sample(0.0, 1.0, cached=None, steps=None, prompt=1000),
    ]
    s = summarise(samples, Slo())
    assert s.acceptance == pytest.approx(1.3)
    assert (s.cached_tokens, s.cached_share) == (60, 0.6)
    assert dict(s.ttft_parts) == pytest.approx({"queue": 0.1, "prefill": 0.2})


def test_what_no_server_said_is_none() -> None:
    s = summarise([sample(0.0, 1.0), sample(0.5, error="timeout", end=9.0)], Slo())
    assert (s.acceptance, s.cached_tokens, s.cached_share) == (None,) * 3
    assert s.ttft_parts == ()
    assert s.wall_s == 9.0
    assert s.offered_rate == 2.0
    nothing = summarise([sample(0.0, error="timeout", end=1.0)], Slo())
    assert nothing.ttft is nothing.e2e is None
