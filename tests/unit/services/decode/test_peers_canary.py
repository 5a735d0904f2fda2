"""Periodic canaries: a pair that stopped moving state turns red, and green by itself; running requests go on."""

from __future__ import annotations

import asyncio

import pytest

from services.decode.peer import PeerState
from services.decode.proving import RESERVING
from sluice.errors import DeadlineExceeded, DigestMismatch, NotReady, Overloaded
from sluice.rpc.messages import CanaryStatus
from tests.unit.services.decode.test_peers import ADDRESS, OFTEN, PASSED, Scene, scene

__all__ = ["scene"]
pytestmark = pytest.mark.asyncio


async def test_a_canary_that_fails_later_turns_the_pair_red_and_it_recovers(scene: Scene) -> None:
    scene.peers.proving._times = OFTEN
    peer = scene.peers.add(ADDRESS)
    await scene.until(PeerState.AGREED, proven=True)
    lost = peer.lost
    scene.canary.errors = [DigestMismatch("target.c4: a byte changed", stage="transfer")] * 3
    await scene.until(PeerState.AGREED, proven=False)
    assert not scene.peers.paired()
    status = peer.status()
    assert status.state == "connecting"
    assert "target.c4: a byte changed" in status.reason
    assert status.canary is not None
    assert "a byte changed" in status.canary.failure
    assert peer.canary_passed_unix_s == PASSED.finished_unix_s, "its age is what an alarm looks at"
    with pytest.raises(NotReady, match="a byte changed"):
        scene.peers.require(ADDRESS)
    assert not lost.is_set(), "running requests prove their own state; they go on"
    await scene.until(PeerState.AGREED, proven=True)
    assert scene.peers.require(ADDRESS)
    assert peer.canary == PASSED


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("our pools are full", stage=RESERVING),
        DeadlineExceeded("no capacity", stage=RESERVING),
    ],
)
async def test_our_own_full_pools_say_nothing_about_a_proven_peer(
    scene: Scene, error: Exception
) -> None:
    scene.peers.proving._times = OFTEN
    peer = scene.peers.add(ADDRESS)
    await scene.until(PeerState.AGREED, proven=True)
    scene.canary.errors = [error] * 3
    runs = scene.canary.runs
    async with asyncio.timeout(3):
        while scene.canary.runs < runs + 4:
            assert peer.proven
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("served", [0, 1])
async def test_a_busy_prefill_is_not_a_broken_one_while_requests_get_through(
    scene: Scene, served: int
) -> None:
    """Otherwise load alone would turn readiness red, and the rest of the fleet would get it next."""
    peer = scene.peers.add(ADDRESS)
    await scene.until(PeerState.AGREED, proven=True)
    ended = asyncio.Event()

    async def late(address: str) -> CanaryStatus:
        peer.served += served
        if not ended.is_set():
            ended.set()
            raise DeadlineExceeded("not done within 10 s", stage="prefill")
        await asyncio.sleep(60)
        return PASSED

    scene.peers.proving.canary = late
    again = asyncio.create_task(scene.peers.proving.again(peer))
    peer.proven, scene.peers.proving._times = True, OFTEN
    await ended.wait()
    await asyncio.sleep(0)
    assert peer.proven == bool(served)
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)


async def test_two_canaries_never_run_at_once(scene: Scene) -> None:
    scene.peers.proving._times = OFTEN
    running = most = 0

    async def counted(address: str) -> CanaryStatus:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.03)
        running -= 1
        return PASSED

    scene.peers.proving.canary = counted
    for port in range(1, 5):
        scene.peers.add(f"127.0.0.1:{port}")
    await asyncio.sleep(0.3)
    assert most == 1
