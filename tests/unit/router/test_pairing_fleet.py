"""Pairs while the fleet changes, fills up and fails; no sockets."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from services.discovery.registry import PodRecord, PodState
from services.router.breaker import BreakerTimes
from sluice.errors import DeadlineExceeded, NotReady, Overloaded, PeerLost
from sluice.rpc.messages import PeerStatus, PrefillStatus
from sluice.types import Epoch, Role
from tests.integration.router_harness import READY
from tests.unit.router.pairing_rig import (
    Answers,
    Client,
    SteeredFleet,
    asked_again,
    lease_of,
    pair_of,
    peers,
    running,
)


@pytest.fixture
def answers() -> Answers:
    return {}


def _pod(role: Role, address: str, state: PodState = PodState.READY) -> PodRecord:
    return PodRecord(role, address, state)


D1, D2 = _pod(Role.DECODE, "d:1"), _pod(Role.DECODE, "d:2")
P1, P2 = _pod(Role.PREFILL, "p:1"), _pod(Role.PREFILL, "p:2")
NEVER: dict[str, object] = {"any_prefill": False, "refresh_s": 60.0}


@pytest.mark.asyncio
@pytest.mark.parametrize("state", [PodState.DRAINING, PodState.STARTING, None])
@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_a_pod_that_discovery_takes_out_is_not_picked_once_more(
    answers: Answers, role: Role, state: PodState | None
) -> None:
    agreed = peers(("p:1", "agreed"), ("p:2", "agreed"))
    answers |= {"d:1": agreed, "d:2": agreed}
    fleet = SteeredFleet(D1, D2, P1, P2)
    victim = D1 if role is Role.DECODE else P1
    async with running(answers, source=fleet, **NEVER) as pairing, AsyncExitStack() as leases:
        rest = [pod for pod in (D1, D2, P1, P2) if pod is not victim]
        fleet.set(*rest, *([replace(victim, state=state)] if state else []))
        for _ in range(20):
            pair = (await lease_of(pairing, leases)).pair
            assert victim.address not in (pair.decode, pair.prefill)


@pytest.mark.asyncio
async def test_pods_that_say_they_can_serve_though_no_probe_got_through(answers: Answers) -> None:
    """A node too busy to run its probes calls all its pods unready at once; they know better."""
    agreed = peers(("p:1", "agreed"))
    answers |= {"d:1": agreed, "d:2": agreed}
    starting = [replace(pod, state=PodState.STARTING) for pod in (D1, D2, P1)]
    fleet = SteeredFleet(*starting)
    async with running(answers, source=fleet, **NEVER) as pairing:
        for leaving in (False, True):
            async with AsyncExitStack() as leases:
                pairs = {(await lease_of(pairing, leases)).pair.decode for _ in range(6)}
            assert pairs == ({"d:2"} if leaving else {"d:1", "d:2"})
            fleet.set(replace(D1, state=PodState.DRAINING), *starting[1:])


@pytest.mark.asyncio
async def test_no_stale_pick_in_500_requests_under_churn(answers: Answers) -> None:
    addresses = [f"d:{n}" for n in range(6)]
    answers |= {address: peers(("p:1", "agreed")) for address in addresses}
    fleet = SteeredFleet(P1, *(_pod(Role.DECODE, address) for address in addresses))
    draw, picked = random.Random(1), set[str]()
    async with running(answers, source=fleet, any_prefill=False) as pairing:
        for _ in range(500):
            alive = draw.sample(addresses, draw.randint(1, 6))
            fleet.set(P1, *(_pod(Role.DECODE, address) for address in alive))
            async with AsyncExitStack() as leases:
                lease = await lease_of(pairing, leases)
                assert lease.pair.decode in alive
                picked.add(lease.pair.decode)
    assert picked == set(addresses)


@pytest.mark.asyncio
async def test_a_stream_outlives_its_pods_removal_from_discovery(answers: Answers) -> None:
    answers["d:1"] = peers(("p:1", "agreed"))
    fleet = SteeredFleet(D1, P1)
    async with running(answers, source=fleet, **NEVER) as pairing:
        async with AsyncExitStack() as leases:
            client = (await lease_of(pairing, leases)).client
            assert isinstance(client, Client)
            fleet.set(P1)
            await asyncio.sleep(0.05)
            assert not client.closed
        await asyncio.sleep(0.01)
        assert client.closed


@pytest.mark.asyncio
async def test_two_layout_classes_never_cross(answers: Answers) -> None:
    """Every decode pod refuses the other class; 200 picks, all within one class."""
    one = peers(("p:1", "agreed"), ("p:2", "refused"))
    two = peers(("p:1", "refused"), ("p:2", "agreed"))
    answers |= {"d:1": one, "d:2": two}
    async with running(answers, "d:1", "d:2", prefills=("p:1", "p:2")) as pairing:
        seen = set()
        for _ in range(200):
            async with AsyncExitStack() as leases:
                lease = await lease_of(pairing, leases)
                seen.add((lease.pair.decode, lease.pair.prefill))
        assert seen == {("d:1", "p:1"), ("d:2", "p:2")}
        refused = [cell for cell in pairing.view().pairs if cell.state == "refused"]
        assert len(refused) == 2
        assert not any(cell.usable for cell in refused)


@pytest.mark.asyncio
async def test_what_exceeds_a_pods_capacity_waits_its_turn(answers: Answers) -> None:
    answers["d:1"] = replace(peers(("p:1", "agreed")), capacity=2)
    async with running(answers, "d:1") as pairing:
        inside = most = 0

        async def request() -> None:
            nonlocal inside, most
            async with AsyncExitStack() as leases:
                await lease_of(pairing, leases)
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0.005)
                inside -= 1

        await asyncio.gather(*(request() for _ in range(40)))
        assert most == 2
        assert (pairing.view().waiting, pairing.view().in_flight) == (0, 0)


@pytest.mark.asyncio
async def test_a_full_queue_is_429_and_a_full_prefill_counts_too(answers: Answers) -> None:
    busy = PrefillStatus(Epoch("e"), True, "", 0, 1, 1, 1, capacity=1)
    peer = PeerStatus("p:1", "e", "agreed", prefill=busy)
    answers["d:1"] = replace(READY, peers=(peer,))
    async with running(answers, "d:1", max_waiting=0) as pairing, AsyncExitStack() as leases:
        with pytest.raises(Overloaded) as caught:
            await lease_of(pairing, leases)
        assert caught.value.retry_after_s


@pytest.mark.asyncio
async def test_a_late_answer_does_not_count_our_own_requests_twice(answers: Answers) -> None:
    """The pod reports what we have running; a capacity of 4 then looked like 2."""
    agreed = replace(peers(("p:1", "agreed")), capacity=4)
    answers["d:1"] = agreed
    async with running(answers, "d:1", refresh_s=60.0) as pairing, AsyncExitStack() as leases:
        for _ in range(2):
            await lease_of(pairing, leases)
        answers["d:1"] = replace(agreed, running=2)
        await asked_again(pairing)
        for _ in range(2):
            await lease_of(pairing, leases, wait_s=0.2)
        with pytest.raises(DeadlineExceeded):
            await lease_of(pairing, leases, wait_s=0.05)


@pytest.mark.asyncio
async def test_requests_wait_for_a_first_pair_but_not_for_ever(answers: Answers) -> None:
    answers["d:1"] = PeerLost("still loading")
    async with running(answers, "d:1", pair_wait_s=0.3) as pairing, AsyncExitStack() as leases:
        waiting = asyncio.create_task(lease_of(pairing, leases))
        await asyncio.sleep(0.05)
        answers["d:1"] = READY
        await asked_again(pairing)
        await waiting
        answers["d:1"] = PeerLost("down")
        await asked_again(pairing)
        waiting = asyncio.create_task(lease_of(pairing, leases))
        with pytest.raises(NotReady, match="down"):
            await waiting
        assert pairing._hopeless, "from now on nobody waits"
        with pytest.raises(NotReady):
            await lease_of(pairing, leases)


@pytest.mark.asyncio
async def test_a_tripped_pair_gets_no_half_request_and_one_probe(answers: Answers) -> None:
    """No request reaches decode for a pair whose breaker is open, and the other pair serves on."""
    answers["d:1"] = peers(("p:1", "agreed"), ("p:2", "agreed"))
    times = BreakerTimes(failures=2, cool_s=0.2)
    bad, good = pair_of("d:1", "p:1"), pair_of("d:1", "p:2")
    async with running(answers, "d:1", breaker=times) as pairing:
        while pairing.view().pairs[0].breaker == "closed":
            async with AsyncExitStack() as leases:
                lease = await lease_of(pairing, leases)
                if lease.pair == bad:
                    lease.failed(PeerLost("gone"))
        assert pairing.readiness().pairs == (good,)
        assert "next try in" in pairing.readiness().reasons[0]
        async with AsyncExitStack() as leases:
            assert {(await lease_of(pairing, leases)).pair for _ in range(10)} == {good}
            await asyncio.sleep(0.25)
            probes = [(await lease_of(pairing, leases)) for _ in range(10)]
            assert [lease.pair for lease in probes].count(bad) == 1
            next(lease for lease in probes if lease.pair == bad).succeeded()
        assert {cell.breaker for cell in pairing.view().pairs} == {"closed"}


@pytest.mark.asyncio
async def test_another_life_of_a_pod_is_another_pair(answers: Answers) -> None:
    answers["d:1"] = peers(("p:1", "agreed"))
    times = BreakerTimes(failures=1, cool_s=60.0)
    async with running(answers, "d:1", breaker=times) as pairing, AsyncExitStack() as leases:
        (await lease_of(pairing, leases)).failed(PeerLost("gone"))
        assert pairing.readiness().pairs == ()
        answers["d:1"] = replace(READY, peers=(PeerStatus("p:1", "e2", "agreed", "", "digest"),))
        await asked_again(pairing)
        lease = await lease_of(pairing, leases)
        assert (lease.pair.prefill_epoch, lease.pair.digest) == ("e2", "digest")
