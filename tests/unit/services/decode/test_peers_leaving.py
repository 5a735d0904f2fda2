"""Prefill peers that discovery adds and drops, that drain, and that are another life than the caller believes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.decode.peer import Held, PeerState
from services.discovery.registry import PodRecord, PodState, RegistryView
from sluice.errors import NotReady, StaleEpoch
from sluice.rpc.messages import PrefillStatus
from sluice.transfer.grant import new_grant
from sluice.types import AttemptId, Epoch, Role
from tests.unit.services.decode.test_peers import ADDRESS, Scene, scene

__all__ = ["scene"]
pytestmark = pytest.mark.asyncio
PREFILL = PodRecord(Role.PREFILL, ADDRESS)
STATUS = PrefillStatus(Epoch("p1"), True, "", queued=1, running=2, paired=1, attempts=0, capacity=8)


def follow(scene: Scene, *pods: PodRecord) -> None:
    scene.peers.follow(RegistryView(1, pods))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(3):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_peers_follow_discovery(scene: Scene) -> None:
    follow(scene, PREFILL, PodRecord(Role.DECODE, "other:1"))
    await scene.until(PeerState.AGREED, proven=True)
    assert [peer.address for peer in scene.peers.all()] == [ADDRESS]
    follow(scene, replace(PREFILL, state=PodState.DRAINING))
    status = scene.peers.all()[0].status()
    assert (status.state, "removed" in status.reason) == ("draining", True)
    with pytest.raises(NotReady, match="on its way out"):
        scene.peers.require(ADDRESS)
    assert not scene.peers.paired()
    follow(scene, PREFILL)
    assert scene.peers.require(ADDRESS)
    follow(scene)
    await until(lambda: scene.peers.all() == ())
    assert scene.link.closed == 1
    follow(scene, PREFILL)
    await scene.until(PeerState.AGREED, proven=True)


async def test_a_dropped_peer_is_kept_while_an_attempt_or_a_quarantine_needs_it(
    scene: Scene,
) -> None:
    """Forgotten too soon, an abort has nobody to ask and its rows are never given back."""
    follow(scene, PREFILL)
    await scene.until(PeerState.AGREED, proven=True)
    peer = scene.peers.all()[0]
    peer.users.add(AttemptId("a"))
    follow(scene)
    await asyncio.sleep(0.1)
    assert scene.peers.all() == (peer,)
    assert not peer.lost.is_set(), "the attempt goes on"
    released = asyncio.Event()

    async def release() -> None:
        released.set()

    scene.peers.hold(peer, AttemptId("a"), Held(new_grant("a"), peer.epoch, release))
    peer.users.clear()
    await asyncio.sleep(0.1)
    assert scene.peers.all() == (peer,)
    scene.link.drained = (AttemptId("a"),)
    await until(lambda: scene.peers.all() == ())
    assert released.is_set()


async def test_a_prefill_that_drains_says_so_with_its_pings(scene: Scene) -> None:
    scene.link.status = STATUS
    peer = scene.peers.add(ADDRESS)
    await until(lambda: peer.proven and peer.prefill == STATUS)
    assert peer.status().prefill == STATUS
    scene.link.status = replace(STATUS, ready=False, reason="shutting down")
    await until(lambda: peer.status().state == "draining")
    assert peer.status().reason == "shutting down"
    assert not peer.lost.is_set()
    scene.link.epoch, scene.link.status = Epoch("p2"), None  # it came back
    await until(lambda: peer.status().state == "agreed")


async def test_a_request_for_another_life_of_the_pair_is_stale(scene: Scene) -> None:
    """A router whose view is a second old must not get an answer from a pair that it did not choose."""
    scene.peers.add(ADDRESS)
    await scene.until(PeerState.AGREED, proven=True)
    _, agreement = scene.peers.require(ADDRESS, epoch=scene.link.epoch)
    assert scene.peers.require(ADDRESS, epoch=scene.link.epoch, digest=agreement.digest)
    with pytest.raises(StaleEpoch, match="p0"):
        scene.peers.require(ADDRESS, epoch=Epoch("p0"))
    with pytest.raises(StaleEpoch):
        scene.peers.require(ADDRESS, digest="another")
    scene.peers.all()[0].state = PeerState.REFUSED  # its new life has another layout
    with pytest.raises(StaleEpoch):
        scene.peers.require(ADDRESS, epoch=Epoch("p0"))
