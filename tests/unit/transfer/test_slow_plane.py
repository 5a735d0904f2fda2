"""A slowed link is late by its rate, one group after another, and costs nothing while it isn't slowed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sluice.pools.base import Region
from sluice.transfer.faults import Faults
from sluice.transfer.loopback import LoopbackFabric, LoopbackPlane
from sluice.transfer.plane import Endpoint, Handle, HandleState, Link, Write
from sluice.transfer.slow_plane import SlowPlane

SIZE = 1000
SLOW = 1e4  # bytes a second


class Rig:
    def __init__(self) -> None:
        self.rate: float | None = None
        fabric = LoopbackFabric()
        self.source = torch.ones(SIZE, dtype=torch.uint8)
        self.target = torch.zeros(SIZE, dtype=torch.uint8)
        self.plane = SlowPlane(LoopbackPlane(fabric, "p"), lambda: self.rate)
        self.plane.open(self.source, _region(self.source))
        self.peer = LoopbackPlane(fabric, "d")
        self.endpoint: Endpoint = self.peer.open(self.target, _region(self.target))
        self.link: Link = self.plane.connect(self.endpoint)

    def post(self) -> Handle:
        write = Write(self.source.data_ptr(), self.target.data_ptr(), SIZE)
        return self.plane.post(self.link, [write])

    def seconds(self, handle: Handle) -> float:
        began = time.monotonic()
        while self.plane.poll(handle).state is HandleState.POSTED:
            time.sleep(0.001)
        self.plane.release(handle)
        return time.monotonic() - began

    def close(self) -> None:
        self.plane.close()
        self.peer.close()


def _region(arena: torch.Tensor) -> tuple[Region, ...]:
    return (Region("all", 0, arena.data_ptr(), SIZE, 1),)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_unslowed_it_is_the_plane_itself(rig: Rig) -> None:
    assert rig.plane.poll(rig.post()).state is HandleState.DONE
    assert bool(rig.target.all())


def test_groups_come_one_after_another_at_the_rate(rig: Rig) -> None:
    rig.rate = SLOW
    first, second = rig.post(), rig.post()
    assert rig.plane.poll(first).state is HandleState.POSTED
    assert rig.seconds(first) > 0.5 * SIZE / SLOW
    assert rig.plane.poll(second).state is HandleState.POSTED
    assert rig.seconds(second) > 0.5 * SIZE / SLOW
    rig.rate = None
    assert rig.plane.poll(rig.post()).state is HandleState.DONE


def test_a_lost_peer_is_told_at_once(rig: Rig) -> None:
    rig.rate = SLOW
    handle = rig.post()
    rig.plane.disconnect(rig.link)
    assert rig.plane.poll(handle).state is not HandleState.POSTED


def test_the_rate_is_read_from_the_fault_directory(tmp_path: Path) -> None:
    assert Faults().link_rate() is None
    faults = Faults(tmp_path)
    assert faults.link_rate() is None
    (tmp_path / "slow.link").write_text("2.5e5")
    assert faults.link_rate() == 2.5e5
    (tmp_path / "slow.link").unlink()
    assert faults.link_rate() is None
