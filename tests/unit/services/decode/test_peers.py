"""Pairings of a decode pod: when a peer counts as proven, and that a stuck one can't eat the pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import pytest_asyncio

import services.decode.peers
from services.decode.peer import Held, PeerState, PeerTimes
from services.decode.peers import Peers
from services.decode.proving import RESERVING
from sluice.errors import NotReady, Overloaded, PeerLost
from sluice.layout.negotiate import Agreement, negotiate
from sluice.rpc.messages import CanaryStatus, PrefillStatus
from sluice.rpc.prefill_link import DrainAnswer, HandshakeAnswer, PingAnswer
from sluice.transfer.grant import GrantState, new_grant
from sluice.transfer.plane import Endpoint
from sluice.types import AttemptId, Epoch
from tests.unit.layout.example_layouts import pair as example_pair

ADDRESS = "127.0.0.1:1"
PREFILL, DECODE = example_pair()
FAST = PeerTimes(
    ping_every_s=0.01,
    ping_timeout_s=0.2,
    handshake_timeout_s=1.0,
    retry_s=0.01,
    refused_retry_s=0.01,
    gone_for_s=60.0,
    canary_every_s=60.0,
    canary_retry_s=0.01,
)
OFTEN = replace(FAST, canary_every_s=0.02)
PASSED = CanaryStatus(1.0, 0.1)
pytestmark = pytest.mark.asyncio


@dataclass
class StubLink:
    """A prefill pod that answers at once; ``drained`` is what it says it has stopped writing."""

    epoch: Epoch = Epoch("p1")  # noqa: RUF009
    drained: tuple[AttemptId, ...] = ()
    drain_calls: int = 0
    silent: bool = False
    status: PrefillStatus | None = None
    closed: int = 0

    async def handshake(self, *_: Any, **__: Any) -> HandshakeAnswer:
        if self.silent:
            raise PeerLost("silent")
        outcome = negotiate(PREFILL, DECODE)
        assert isinstance(outcome, Agreement)
        return HandshakeAnswer(PREFILL, self.epoch, outcome.digest)

    async def ping(self, *_: Any) -> PingAnswer:
        if self.silent:
            raise PeerLost("silent")
        return PingAnswer(self.epoch, True, self.status)

    async def drain(self, *_: Any) -> DrainAnswer:
        self.drain_calls += 1
        return DrainAnswer(self.epoch, self.drained)

    async def close(self) -> None:
        self.closed += 1


@dataclass
class Canary:
    """Counts its runs; raises ``errors`` in turn first."""

    errors: list[Exception] = field(default_factory=list)
    runs: int = 0

    async def run(self, address: str) -> CanaryStatus:
        self.runs += 1
        if self.errors:
            raise self.errors.pop(0)
        return PASSED


@dataclass
class Scene:
    peers: Peers
    link: StubLink
    canary: Canary

    async def until(self, state: PeerState, proven: bool) -> None:
        async with asyncio.timeout(3):
            while True:
                peer = self.peers.all()[0]
                if peer.state is state and peer.proven == proven:
                    return
                await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    link, canary = StubLink(), Canary()
    monkeypatch.setattr(services.decode.peers, "PrefillLink", lambda *_: link)

    async def listening(self: Peers, address: str) -> bool:
        return False

    monkeypatch.setattr(Peers, "_refused", listening)
    endpoint = Endpoint("loopback", "agent", b"", "DRAM", 0, ())
    peers = Peers(DECODE, Epoch("d"), (endpoint,), allow_missing_draft=False, times=FAST)
    peers.proving.canary = canary.run
    yield Scene(peers, link, canary)
    await peers.close()


async def test_a_peer_takes_requests_only_after_its_canary(scene: Scene) -> None:
    gate = asyncio.Event()

    async def slow(address: str) -> CanaryStatus:
        await gate.wait()
        return PASSED

    scene.peers.proving.canary = slow
    scene.peers.add(ADDRESS)
    await scene.until(PeerState.AGREED, proven=False)
    with pytest.raises(NotReady, match="canary"):
        scene.peers.require(ADDRESS)
    assert scene.peers.require(ADDRESS, proving=True)
    assert scene.peers.all()[0].status().state == "connecting", "a router must not pick it yet"
    assert not scene.peers.paired()
    gate.set()
    await scene.until(PeerState.AGREED, proven=True)
    assert scene.peers.require(ADDRESS)
    assert scene.peers.paired()


async def test_our_own_full_pools_do_not_make_a_peer_lost(scene: Scene) -> None:
    scene.canary.errors = [Overloaded("pools are full", stage=RESERVING) for _ in range(3)]
    peer = scene.peers.add(ADDRESS)
    await scene.until(PeerState.AGREED, proven=True)
    assert scene.canary.runs == 4
    assert not peer.lost.is_set()


async def test_a_peer_that_may_still_write_gets_no_further_canary(scene: Scene) -> None:
    """Each would pin more rows, until a pod with healthy other peers is out of memory."""
    peer = scene.peers.add(ADDRESS)
    await scene.until(PeerState.AGREED, proven=True)
    released = asyncio.Event()

    async def release() -> None:
        released.set()

    grant = new_grant("a")
    scene.peers.hold(peer, AttemptId("a"), Held(grant, scene.link.epoch, release))
    scene.link.silent = True
    await scene.until(PeerState.LOST, proven=False)
    runs = scene.canary.runs
    scene.link.silent = False
    await asyncio.sleep(0.2)
    assert scene.canary.runs == runs
    assert not released.is_set()
    assert not scene.peers.paired()
    scene.link.drained = (AttemptId("a"),)
    await scene.until(PeerState.AGREED, proven=True)
    assert released.is_set()
    assert grant.state is GrantState.SETTLED


async def test_another_life_of_the_peer_is_proven_anew(scene: Scene) -> None:
    peer = scene.peers.add(ADDRESS)
    await scene.until(PeerState.AGREED, proven=True)
    old = peer.lost
    scene.link.epoch = Epoch("p2")
    await scene.peers.negotiated(ADDRESS, 1.0)  # an operator's Pair comes before the keeper's ping
    assert old.is_set(), "attempts of the old life must hear of its end"
    await scene.until(PeerState.AGREED, proven=True)
    assert scene.canary.runs == 2
