"""Fault points: free when off, holding exactly while their file exists."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from sluice.transfer.faults import FaultPoint, Faults


def test_off_by_default() -> None:
    faults = Faults()
    assert not any(faults.holds(point) for point in FaultPoint)
    assert faults.withhold == frozenset()


@pytest.mark.asyncio
async def test_a_held_point_reports_arrival_and_waits_for_release(tmp_path: Path) -> None:
    faults, point = Faults(tmp_path), FaultPoint.PREFILL_COMPLETE
    hold, at = tmp_path / f"hold.{point.value}", tmp_path / f"at.{point.value}"
    await asyncio.wait_for(faults.reach(point), 1)
    assert not at.exists()
    hold.touch()
    waiting = asyncio.create_task(faults.reach(point))
    await asyncio.sleep(0.05)
    assert at.exists()
    assert not waiting.done()
    await asyncio.wait_for(faults.reach(FaultPoint.DECODE_GRANTED), 1)  # others are free
    hold.unlink()
    await asyncio.wait_for(waiting, 1)


def test_a_held_thread_waits_too(tmp_path: Path) -> None:
    faults, point = Faults(tmp_path), FaultPoint.PREFILL_POST
    hold = tmp_path / f"hold.{point.value}"
    hold.touch()
    thread = threading.Thread(target=faults.reach_blocking, args=(point,))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    hold.unlink()
    thread.join(2)
    assert not thread.is_alive()
