"""The canary's verdict on speed, and that every run is counted."""

from __future__ import annotations

from typing import cast

import pytest

from services.decode.acceptance import AcceptanceWatch
from services.decode.attempts import Attempts
from services.decode.canary import Canary
from services.decode.metering import DecodeMetrics
from sluice.errors import PeerLost, TransferFailed
from sluice.rpc.messages import GenerateCall
from sluice.transfer.messages import AttemptComplete, Moved, Timings
from sluice.types import AttemptId, Epoch
from tests.unit.layout.example_layouts import pair

LAYOUT = pair()[1]
MOVED = (
    Moved("target.c4", 10, 1_000_000, b"d", 0.1),  # 10 MB/s
    Moved("draft.hidden", 1, 100, b"d", 0.01),  # a crawl, because it is so small
)
pytestmark = pytest.mark.asyncio


class StubAttempts:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[GenerateCall] = []

    async def canary(self, call: GenerateCall) -> AttemptComplete:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        return AttemptComplete(
            AttemptId(call.attempt_id), Epoch("p"), 1, 5, 0, Timings(), MOVED, transport="cma"
        )


def canary(attempts: StubAttempts, floor: float = 0.0) -> tuple[Canary, DecodeMetrics]:
    metrics = DecodeMetrics(AcceptanceWatch(True))
    return Canary(cast("Attempts", attempts), LAYOUT, 100, metrics, floor), metrics


def runs(metrics: DecodeMetrics, outcome: str) -> float:
    name = "sluice_decode_canary_runs_total"
    return metrics.metrics.registry.get_sample_value(name, {"outcome": outcome}) or 0.0


async def test_what_crossed_is_reported_with_its_speed() -> None:
    one, metrics = canary(StubAttempts(), floor=9e6)
    status = await one.run("p:1")
    assert status.failure == ""
    assert status.transport == "cma"
    assert status.components[0].bytes_per_s == 1e7
    assert runs(metrics, "passed") == 1


async def test_a_link_below_the_floor_fails_by_its_largest_component() -> None:
    one, metrics = canary(StubAttempts(), floor=11e6)
    with pytest.raises(TransferFailed, match=r"target\.c4.*10 MB/s, the floor is 11 MB/s"):
        await one.run("p:1")
    assert runs(metrics, "TransferFailed") == 1


async def test_a_failure_is_counted_by_its_code() -> None:
    one, metrics = canary(StubAttempts(PeerLost("gone")))
    with pytest.raises(PeerLost):
        await one.run("p:1")
    assert runs(metrics, "PeerLost") == 1
    assert runs(metrics, "passed") == 0


async def test_its_prompt_fills_a_window_and_leaves_a_block_of_every_ratio_open() -> None:
    attempts = StubAttempts()
    await canary(attempts)[0].run("p:1")
    tokens, geometry = len(attempts.calls[0].prompt), LAYOUT.geometry
    assert tokens > geometry.window_tokens
    assert all(
        tokens > ratio and tokens % ratio for ratio in geometry.compression_ratios if ratio > 1
    )
