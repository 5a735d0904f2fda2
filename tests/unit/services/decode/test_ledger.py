"""The parts of a time to first token add up, whatever prefill reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.decode.ledger import Ledger
from sluice.transfer.messages import Timings

SECONDS = st.floats(0, 1000, allow_nan=False)
REPORTED = st.floats(-10, 2000, allow_nan=False)  # another clock, or a liar


@given(st.lists(SECONDS, min_size=5, max_size=5), REPORTED, REPORTED, REPORTED)
def test_the_parts_add_up_and_none_is_negative(
    gaps: list[float], queue_s: float, prefill_s: float, wire_s: float
) -> None:
    at = [sum(gaps[: i + 1]) for i in range(5)]
    ledger = Ledger(*at[:4])
    timings = ledger.timings(Timings(queue_s, prefill_s, wire_s), at[4])
    assert sum(timings.parts) == pytest.approx(timings.ttft_s, abs=1e-9)
    assert min(timings.parts) >= -1e-12
    assert timings.prefill_queue_s <= timings.queue_s + 1e-9
    assert timings.wire_s <= timings.transfer_s


def test_an_honest_report_lands_where_it_belongs() -> None:
    timings = Ledger(10.0, 11.0, 15.0, 15.5).timings(Timings(0.5, 2.0, 1.0), 15.75)
    assert timings == Timings(1.5, 2.0, 1.5, 0.5, 0.25, 5.75, 0.5, 1.0)
