"""Pairings of a prefill pod: one connection an epoch, whatever happens to those who asked for it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from services.prefill.peers import Peers
from services.sides import Sides
from sluice.errors import StaleEpoch, TransferFailed
from sluice.layout.negotiate import Agreement, Refusal
from sluice.pools.base import StateMemory
from sluice.transfer.plane import Endpoint
from sluice.transfer.side import Place, RankSide
from sluice.transfer.worker import TransferWorker
from sluice.types import Epoch
from tests.unit.layout.example_layouts import pair as example_pair

EPOCH = Epoch("e")
ENDPOINT = Endpoint("loopback", "agent", b"", "DRAM", 0, ())
pytestmark = pytest.mark.asyncio


@dataclass
class StubLink:
    endpoint: Endpoint = ENDPOINT
    lost: bool = False


class StubWorker:
    """Connects when the test says so; like NIXL it never connects one agent twice."""

    def __init__(self) -> None:
        self.connecting: list[Future[StubLink]] = []
        self.disconnected: list[StubLink] = []

    def connect(self, peer: Endpoint) -> Future[StubLink]:
        future: Future[StubLink] = Future()
        future.set_running_or_notify_cancel()
        self.connecting.append(future)
        return future

    def disconnect(self, link: StubLink, *, peer_gone: bool = False) -> Future[None]:
        self.disconnected.append(link)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class NoMemory:
    def regions(self) -> tuple[()]:
        return ()


async def turns() -> None:
    """As many of the event loop as any step here needs, however long each takes."""
    for _ in range(50):
        await asyncio.sleep(0)


def peers_and_worker(**changes: Any) -> tuple[Peers, StubWorker, Any]:
    prefill, decode = example_pair(**changes)
    worker = StubWorker()
    side = RankSide(Place(), cast("StateMemory", NoMemory()), cast("TransferWorker", worker))
    return Peers(prefill, Sides(side)), worker, decode


async def pair(peers: Peers, decode: Any) -> Agreement | Refusal:
    return await peers.pair(decode, EPOCH, (ENDPOINT,), allow_missing_draft=False)


async def test_a_handshake_cancelled_while_connecting_does_not_bar_the_epoch() -> None:
    peers, worker, decode = peers_and_worker()
    first = asyncio.create_task(pair(peers, decode))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    worker.connecting[0].set_result(StubLink())  # the I/O thread connected all the same
    agreement = await pair(peers, decode)
    assert isinstance(agreement, Agreement)
    assert len(worker.connecting) == 1
    assert peers.require(EPOCH, agreement.digest).epoch == EPOCH


async def test_two_handshakes_at_once_connect_once() -> None:
    peers, worker, decode = peers_and_worker()
    both = [asyncio.create_task(pair(peers, decode)) for _ in range(2)]
    await turns()
    worker.connecting[0].set_result(StubLink())
    assert all(isinstance(outcome, Agreement) for outcome in await asyncio.gather(*both))
    assert len(worker.connecting) == len(peers) == 1


async def test_a_failed_connection_is_tried_again_by_the_next_handshake() -> None:
    peers, worker, decode = peers_and_worker()
    first = asyncio.create_task(pair(peers, decode))
    await turns()
    worker.connecting[0].set_exception(TransferFailed("no route"))
    with pytest.raises(TransferFailed, match="no route"):
        await first
    second = asyncio.create_task(pair(peers, decode))
    await turns()
    worker.connecting[1].set_result(StubLink())
    assert isinstance(await second, Agreement)


async def test_a_broken_link_is_made_anew_once_nothing_uses_it() -> None:
    peers, worker, decode = peers_and_worker()
    first = asyncio.create_task(pair(peers, decode))
    await turns()
    broken = StubLink()
    worker.connecting[0].set_result(broken)
    agreement = await first
    assert isinstance(agreement, Agreement)
    broken.lost = True
    peers.require(EPOCH, agreement.digest).attempts.add(cast("Any", "a"))
    await pair(peers, decode)
    assert worker.disconnected == [], "an attempt may still write through it"
    peers.require(EPOCH, agreement.digest).attempts.clear()
    again = asyncio.create_task(pair(peers, decode))
    await turns()
    assert worker.disconnected == [broken]
    worker.connecting[1].set_result(StubLink())
    assert isinstance(await again, Agreement)


async def test_a_refused_pod_connects_nothing() -> None:
    peers, worker, decode = peers_and_worker()
    refused = replace(decode, wire_version=decode.wire_version + 1)
    assert isinstance(await pair(peers, refused), Refusal)
    assert worker.connecting == []
    with pytest.raises(StaleEpoch, match="no handshake"):
        peers.require(EPOCH, "digest")
