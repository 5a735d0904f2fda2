"""A random life of a fleet: requests come, end, fail and leave while pods fill, drain, restart and vanish."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from services.discovery.registry import PodRecord, PodState
from services.router.breaker import BreakerTimes
from services.router.pairing import Pairing
from services.router.policy import PolicyName, make_policy
from sluice.errors import NotReady, Overloaded, PeerLost
from sluice.rpc.messages import DecodeStatus, PeerStatus, PrefillStatus
from sluice.types import Epoch, Role
from tests.integration.router_harness import READY
from tests.unit.router.pairing_rig import Answers, SteeredFleet, running

CAPACITY = {"d:0": 1, "d:1": 2, "d:2": 3}
PREFILLS = ("p:0", "p:1")
STEPS = 400


@dataclass
class World:
    """What is true of the pods; ``held`` counts leases by address."""

    draw: random.Random
    pairing: Pairing
    fleet: SteeredFleet
    answers: Answers
    held: Counter[str] = field(default_factory=Counter)
    allowed: dict[str, set[str]] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    failures: list[BaseException] = field(default_factory=list)
    served: int = 0

    def request(self) -> None:
        task = asyncio.create_task(self._request())
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error)

    async def _request(self) -> None:
        prompt = tuple(self.draw.choices(range(3), k=8))
        deadline = asyncio.get_running_loop().time() + 30
        try:
            async with self.pairing.lease(prompt, deadline) as lease:
                pair = lease.pair
                assert pair.prefill in self.allowed[pair.decode], "a cross pair"
                self.held.update((pair.decode, pair.prefill))
                assert self.held[pair.decode] <= CAPACITY[pair.decode]
                prefilling = True
                try:
                    await asyncio.sleep(self.draw.uniform(0, 0.01))
                    self.held.subtract((pair.prefill,))
                    prefilling = False
                    lease.prefill_done()
                    await asyncio.sleep(self.draw.uniform(0, 0.01))
                    lease.failed(
                        PeerLost("gone")
                    ) if self.draw.random() < 0.2 else lease.succeeded()
                finally:
                    self.held.subtract((pair.decode, *([pair.prefill] * prefilling)))
                self.served += 1
        except (NotReady, Overloaded):
            pass

    def change_pods(self) -> None:
        """Most are there and ready most of the time."""
        states = [*PodState, *[PodState.READY] * 12]
        present = [a for a in (*CAPACITY, *PREFILLS) if self.draw.random() < 0.85]
        self.set_pods({address: self.draw.choice(states) for address in present})

    def set_pods(self, states: dict[str, PodState]) -> None:
        roles = {"d": Role.DECODE, "p": Role.PREFILL}
        self.fleet.set(*(PodRecord(roles[a[0]], a, state) for a, state in states.items()))

    def restart(self, decode: str) -> None:
        """Another life, another layout class perhaps."""
        classes = self.draw.choice([{"p:0"}, {"p:1"}, {"p:0", "p:1"}])
        self.allowed.setdefault(decode, set()).update(classes)
        self.answers[decode] = self.status(decode, classes)
        if (watch := self.pairing._watches.get(decode)) is not None:
            watch.look_again()

    def status(self, decode: str, agreed: set[str]) -> DecodeStatus:
        said = PrefillStatus(Epoch("p"), True, "", 0, 0, 1, 0, capacity=4)
        peers = tuple(
            PeerStatus(p, "p", "agreed" if p in agreed else "refused", prefill=said)
            for p in PREFILLS
        )
        epoch = Epoch(str(self.draw.random()))
        return replace(READY, epoch=epoch, peers=peers, capacity=CAPACITY[decode])

    async def leave_some(self) -> None:
        for task in self.draw.sample(sorted(self.tasks, key=id), min(2, len(self.tasks))):
            task.cancel()


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", PolicyName)
async def test_nothing_is_lost_stuck_or_overfilled(policy: PolicyName) -> None:
    fleet, answers = SteeredFleet(), Answers()
    draw = random.Random(policy.value)
    breaker = BreakerTimes(failures=2, cool_s=0.02, max_cool_s=0.05)
    async with running(
        answers,
        source=fleet,
        policy=make_policy(policy, 4),
        breaker=breaker,
        any_prefill=False,
        pair_wait_s=5.0,
        refresh_s=60.0,  # only what happens wakes who waits
    ) as pairing:
        world = World(draw, pairing, fleet, answers)
        for decode in CAPACITY:
            world.restart(decode)
        world.set_pods(dict.fromkeys((*CAPACITY, *PREFILLS), PodState.READY))
        for _ in range(STEPS):
            match draw.randrange(20):
                case 0:
                    world.change_pods()
                case 1:
                    world.restart(draw.choice(sorted(CAPACITY)))
                case 2:
                    await world.leave_some()
                case _:
                    world.request()
            await asyncio.sleep(draw.choice([0, 0, 0.003]))
        for decode in CAPACITY:
            answers[decode] = world.status(decode, set(PREFILLS))
            world.allowed[decode] = set(PREFILLS)
            if (watch := pairing._watches.get(decode)) is not None:
                watch.look_again()
        world.set_pods(dict.fromkeys((*CAPACITY, *PREFILLS), PodState.READY))
        async with asyncio.timeout(20):  # nobody may be left waiting while there is room
            await asyncio.gather(*world.tasks, return_exceptions=True)
        assert world.failures == []
        view = pairing.view()
        assert (view.waiting, view.in_flight) == (0, 0)
        assert {pod.in_flight for pod in view.pods} == {0}
        assert not +world.held
        assert world.served > STEPS / 6
