"""A `Pairing` over scripted decode clients: no sockets. ``answers`` says what each address answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from services.discovery.registry import PodRecord, Registry, Source
from services.discovery.static import StaticSource
from services.router.fleet import Pair
from services.router.lease import Lease
from services.router.pairing import Pairing, PairingConfig
from services.router.policy import LeastLoad, Policy
from sluice.rpc.messages import DecodeStatus, PeerStatus
from sluice.types import Epoch
from tests.integration.router_harness import READY

Answers = dict[str, DecodeStatus | Exception]


class Client:
    """Stands for a decode client."""

    def __init__(self, address: str, answers: Answers) -> None:
        self.address = address
        self.asked = 0
        self.closed = False
        self._answers = answers

    async def get_status(self, timeout_s: float) -> DecodeStatus:
        self.asked += 1
        answer = self._answers[self.address]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed = True


class SteeredFleet:
    """A source that a test steers."""

    def __init__(self, *pods: PodRecord) -> None:
        self.pods = pods
        self.registry: Registry | None = None

    async def watch(self, registry: Registry) -> None:
        self.registry = registry
        registry.replace(self.pods)
        await asyncio.Event().wait()

    def set(self, *pods: PodRecord) -> None:
        assert self.registry is not None
        self.registry.replace(pods)


def peers(*states: tuple[str, str]) -> DecodeStatus:
    return replace(READY, peers=tuple(PeerStatus(a, "e", state) for a, state in states))


def pair_of(decode: str, prefill: str) -> Pair:
    """As these statuses name it."""
    return Pair(decode, prefill, READY.epoch, Epoch("e"))


@asynccontextmanager
async def running(
    answers: Answers,
    *decodes: str,
    prefills: tuple[str, ...] = (),
    source: Source | None = None,
    policy: Policy | None = None,
    **config: object,
) -> AsyncIterator[Pairing]:
    defaults = {"refresh_s": 0.02, "pair_wait_s": 0.05, "any_prefill": not prefills}
    pairing = Pairing(
        source or StaticSource(prefills=prefills, decodes=decodes),
        policy or LeastLoad(),
        PairingConfig(**(defaults | config)),  # type: ignore[arg-type]
        lambda address: Client(address, answers),  # type: ignore[arg-type, return-value]
    )
    await pairing.start()
    try:
        yield pairing
    finally:
        await pairing.stop()


async def lease_of(
    pairing: Pairing, leases: AsyncExitStack, *avoid: Pair, wait_s: float = 5
) -> Lease:
    deadline = asyncio.get_running_loop().time() + wait_s
    return await leases.enter_async_context(pairing.lease((1, 2, 3), deadline, avoid))


async def asked_again(source: Pairing, times: int = 1) -> None:
    """What a failed attempt brings about."""
    watch = source._watches["d:1"]
    client = watch.client
    assert isinstance(client, Client)
    for _ in range(times):
        before = client.asked
        watch.look_again()
        async with asyncio.timeout(2):
            while client.asked == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.sleep(0)
