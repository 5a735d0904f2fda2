"""What can befall one pod of a fleet under load, each with what clients may see of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from sluice.rpc.client import DecodeClient, PrefillClient
from sluice.transfer.faults import FaultPoint
from sluice.types import Sampling
from tests.e2e.fleet import LONGEST_TOKENS, MAX_QUEUE, Fleet, Outcome, streams
from tests.e2e.pods import Answer, Pair, Pod, eventually, generate

TOKENS = 64  # of each answer: enough for a fault in mid-stream
MID_STREAM_S = 0.3
_FEW = Sampling(max_tokens=4, ignore_eos=True)
_TWO_CHUNKS = tuple(3 + i % 200 for i in range(600))


@dataclass
class Scene:
    """``load`` is one request of each prompt, all at once, half of them on the victim's pair."""

    fleet: Fleet
    pair: Pair
    victim: Pod
    prompts: list[str]
    timeout_s: float

    def load(self) -> asyncio.Task[list[Outcome]]:
        prompts = self.prompts
        return asyncio.create_task(
            streams(self.fleet, prompts, TOKENS, at_once=len(prompts), timeout_s=self.timeout_s)
        )

    @property
    def others(self) -> list[Pair]:
        return [pair for pair in self.fleet.pairs if pair is not self.pair]

    @property
    def is_prefill(self) -> bool:
        return self.victim is self.pair.prefill


async def killed(scene: Scene) -> list[Outcome]:
    load = scene.load()
    await asyncio.sleep(MID_STREAM_S)
    scene.victim.kill()
    return await load


async def frozen(scene: Scene) -> list[Outcome]:
    load = scene.load()
    await asyncio.sleep(MID_STREAM_S)
    scene.victim.freeze()
    try:
        return await load
    finally:
        scene.victim.thaw()


async def slow(scene: Scene) -> list[Outcome]:
    """From the first request on, so that a prefill pod is slow while it has work."""
    async with crawling(scene.victim):
        return await scene.load()


async def full(scene: Scene) -> list[Outcome]:
    """Other routers have filled its queue since it was last asked: it refuses before any work."""
    async with crowded_prefill(scene) if scene.is_prefill else crowded_decode(scene.pair):
        before = scene.fleet.retried().count("Overloaded")
        load = scene.load()
        if scene.is_prefill:
            await _attempts(scene.pair, 1 + MAX_QUEUE + len(scene.prompts) // 2)
            scene.pair.let_all_go()
        outcomes = await load
    assert scene.fleet.retried().count("Overloaded") == before + len(scene.prompts) // 2
    return outcomes


async def starved(scene: Scene) -> list[Outcome]:
    """Other routers' requests hold its memory, and go on holding it: who waits for some waits in vain."""
    async with crowded_decode(scene.pair, waiting=1):
        return await scene.load()


async def vanished(scene: Scene) -> list[Outcome]:
    """Discovery stops naming it while state of requests is on its way; it lives on."""
    retried = len(scene.fleet.retried())
    scene.pair.hold(FaultPoint.PREFILL_COMPLETE)
    load = scene.load()
    await _attempts(scene.pair, len(scene.prompts) // 2)
    scene.fleet.list_pod(scene.victim, None)
    await scene.fleet.ready(*scene.others)
    if scene.is_prefill:
        await _pairing(scene.pair, "draining")
    scene.pair.let_all_go()
    outcomes = await load
    if scene.is_prefill:
        await _pairing(scene.pair, "")  # nobody needs it any more
    assert len(scene.fleet.retried()) == retried, "what runs goes on where it is"
    return outcomes


async def deleted(scene: Scene) -> list[Outcome]:
    """Discovery stops naming it and it dies, both at once, while state of requests is on its way."""
    scene.pair.hold(FaultPoint.PREFILL_COMPLETE)
    load = scene.load()
    await _attempts(scene.pair, len(scene.prompts) // 2)
    scene.fleet.list_pod(scene.victim, None)
    scene.victim.kill()
    scene.pair.let_all_go()
    outcomes = await load
    if scene.is_prefill:
        await _pairing(scene.pair, "")
    return outcomes


@dataclass(frozen=True)
class Fault:
    """``spares_all``: every client gets its whole answer, from the other pair if need be."""

    strike: Callable[[Scene], Awaitable[list[Outcome]]]
    spares_all: bool = False
    timeout_s: float = 8.0  # the clients'


FAULTS = {
    "killed": Fault(killed),
    "frozen": Fault(frozen),
    "slow": Fault(slow, spares_all=True, timeout_s=40.0),
    "full": Fault(full, spares_all=True),
    "starved": Fault(starved, timeout_s=3.0),
    "vanished": Fault(vanished, spares_all=True),
    "deleted": Fault(deleted, spares_all=True),
}


@contextlib.asynccontextmanager
async def crawling(pod: Pod) -> AsyncIterator[None]:
    """It runs a quarter of the time."""

    async def crawl() -> None:
        while True:
            pod.freeze()
            await asyncio.sleep(0.15)
            pod.thaw()
            await asyncio.sleep(0.05)

    task = asyncio.create_task(crawl())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        pod.thaw()


@contextlib.asynccontextmanager
async def crowded_prefill(scene: Scene) -> AsyncIterator[None]:
    """Its step thread is held in a long prompt, with as many more behind it as its queue takes. All get answers."""
    pair = scene.pair
    pair.hold(FaultPoint.PREFILL_CHUNK)
    others: list[asyncio.Task[Answer]] = []
    try:
        others.append(asyncio.create_task(generate(pair, _TWO_CHUNKS, _FEW)))
        await pair.reached(FaultPoint.PREFILL_CHUNK)
        others += [
            asyncio.create_task(generate(pair, (5 + n, 6, 7), _FEW)) for n in range(MAX_QUEUE)
        ]
        await _attempts(pair, 1 + MAX_QUEUE)
        yield
        answers = await asyncio.gather(*others)
        assert all(len(answer.token_ids) == _FEW.max_tokens for answer in answers)
    finally:
        pair.let_all_go()
        await _given_up(others)


@contextlib.asynccontextmanager
async def crowded_decode(pair: Pair, waiting: int = MAX_QUEUE) -> AsyncIterator[None]:
    """Its memory is promised to requests that don't get on, and so many ``waiting`` ones stand in its queue."""
    pair.hold(FaultPoint.DECODE_GRANTED)
    largest = Sampling(max_tokens=LONGEST_TOKENS, ignore_eos=True)
    others: list[asyncio.Task[Answer]] = []
    try:
        async with DecodeClient(pair.decode.address) as client:

            async def queued(count: int) -> bool:
                return (await client.get_status(2.0)).queued >= count

            while not await queued(1):
                others.append(asyncio.create_task(generate(pair, (5, 6, 7), largest)))
                await asyncio.sleep(0.05)
            others += [
                asyncio.create_task(generate(pair, (5, 6, 7), largest)) for _ in range(waiting - 1)
            ]
            await eventually(lambda: queued(waiting), 15, f"{waiting} requests wait for memory")
        yield
    finally:
        await _given_up(others)
        pair.let_all_go()


async def _given_up(requests: list[asyncio.Task[Answer]]) -> None:
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


async def _attempts(pair: Pair, count: int) -> None:
    async with PrefillClient(pair.prefill.address) as client:

        async def look() -> bool:
            return (await client.get_status(2.0)).attempts == count

        await eventually(look, 15, f"{count} attempts on prefill")


async def _pairing(pair: Pair, state: str) -> None:
    """What decode says of its prefill; empty = it doesn't know it any more."""
    async with DecodeClient(pair.decode.address) as client:

        async def look() -> bool:
            peers = {peer.address: peer.state for peer in (await client.get_status(2.0)).peers}
            return peers.get(pair.prefill.address, "") == state

        await eventually(look, 15, f"prefill is {state or 'forgotten'}")
