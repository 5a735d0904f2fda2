"""Choice of a pair from what decode pods say; no sockets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from sluice.errors import DeadlineExceeded, NotReady, PeerLost
from tests.integration.router_harness import READY
from tests.unit.router.pairing_rig import (
    Answers,
    asked_again,
    lease_of,
    pair_of,
    peers,
    running,
)


@pytest.fixture
def answers() -> Answers:
    return {}


@pytest.mark.asyncio
async def test_only_agreed_pairs_count(answers: Answers) -> None:
    answers["d:1"] = peers(("p:1", "agreed"), ("p:2", "refused"), ("p:3", "lost"))
    answers["d:2"] = replace(peers(("p:1", "agreed")), ready=False, reason="draining")
    answers["d:3"] = PeerLost("no route")
    async with running(answers, "d:1", "d:2", "d:3") as source:
        seen = source.readiness()
    assert seen.pairs == (pair_of("d:1", "p:1"),)
    text = "; ".join(seen.reasons)
    for part in ("p:2 is refused", "p:3 is lost", "draining", "no route"):
        assert part in text


@pytest.mark.asyncio
async def test_no_pair_is_not_ready_and_says_why(answers: Answers) -> None:
    answers["d:1"] = PeerLost("no route")
    async with running(answers, "d:1") as pairing, AsyncExitStack() as leases:
        with pytest.raises(NotReady, match="no route") as caught:
            await lease_of(pairing, leases)
    assert caught.value.retry_after_s


@pytest.mark.asyncio
async def test_leases_spread_over_decodes_and_prefills(answers: Answers) -> None:
    agreed = peers(("p:1", "agreed"), ("p:2", "agreed"))
    answers |= {"d:1": agreed, "d:2": agreed}
    async with running(answers, "d:1", "d:2") as pairing:
        async with AsyncExitStack() as leases:
            pairs = [(await lease_of(pairing, leases)).pair for _ in range(4)]
            assert pairing.view().in_flight == 4
        assert sorted(pair.decode for pair in pairs) == ["d:1", "d:1", "d:2", "d:2"]
        assert sorted(pair.prefill for pair in pairs) == ["p:1", "p:1", "p:2", "p:2"]
        assert {pod.in_flight for pod in pairing.view().pods} == {0}


@pytest.mark.asyncio
async def test_a_prefill_is_free_after_the_first_token(answers: Answers) -> None:
    answers["d:1"] = peers(("p:1", "agreed"), ("p:2", "agreed"))
    async with running(answers, "d:1") as pairing, AsyncExitStack() as leases:
        first = await lease_of(pairing, leases)
        first.prefill_done()
        first.prefill_done()
        second, third = await lease_of(pairing, leases), await lease_of(pairing, leases)
        assert second.pair != first.pair  # equally free: the one picked longer ago
        assert third.pair == first.pair


@pytest.mark.asyncio
async def test_reported_load_counts(answers: Answers) -> None:
    agreed = peers(("p:1", "agreed"))
    answers |= {"d:1": replace(agreed, queued=3, running=2), "d:2": replace(agreed, running=4)}
    async with running(answers, "d:1", "d:2") as pairing, AsyncExitStack() as leases:
        assert (await lease_of(pairing, leases)).pair.decode == "d:2"


@pytest.mark.asyncio
async def test_avoided_pairs_come_last(answers: Answers) -> None:
    agreed = peers(("p:1", "agreed"))
    answers |= {"d:1": agreed, "d:2": replace(agreed, running=50)}
    async with running(answers, "d:1", "d:2") as pairing, AsyncExitStack() as leases:
        first, second = pair_of("d:1", "p:1"), pair_of("d:2", "p:1")
        assert (await lease_of(pairing, leases, first)).pair == second
        assert (await lease_of(pairing, leases, first, second)).pair == first


@pytest.mark.asyncio
async def test_a_lost_pod_comes_back(answers: Answers) -> None:
    answers["d:1"] = PeerLost("down")
    async with running(answers, "d:1") as source:
        assert source.readiness().pairs == ()
        answers["d:1"] = READY
        await asked_again(source)  # at once, whatever the back-off
        assert len(source.readiness().pairs) == 1
        assert source.max_model_tokens() == READY.max_model_tokens


@pytest.mark.asyncio
async def test_a_busy_pod_that_answers_late_is_not_lost_at_once(answers: Answers) -> None:
    """A step of a large model on a loaded machine outlasts the status call; new clients got 503."""
    answers["d:1"] = READY
    async with running(answers, "d:1", refresh_s=60.0) as source:
        answers["d:1"] = DeadlineExceeded("late")
        await asked_again(source, 2)
        assert source.readiness().pairs
        answers["d:1"] = READY
        await asked_again(source)
        answers["d:1"] = DeadlineExceeded("late")
        await asked_again(source, 2)
        assert source.readiness().pairs, "an answer in time starts the count anew"
        await asked_again(source)
        assert source.readiness().reasons == ("decode d:1: late",)


@pytest.mark.asyncio
async def test_a_lost_pods_limit_stays_known(answers: Answers) -> None:
    answers["d:1"] = READY
    async with running(answers, "d:1", refresh_s=60.0) as source:
        answers["d:1"] = PeerLost("down")
        await asked_again(source)
        assert source.readiness().pairs == ()
        assert source.max_model_tokens() == READY.max_model_tokens


@pytest.mark.asyncio
async def test_a_bug_in_a_refresh_does_not_end_the_watch(answers: Answers) -> None:
    answers["d:1"] = READY
    async with running(answers, "d:1") as source:
        answers["d:1"] = KeyError("bug")
        await asyncio.sleep(0.1)
        assert "KeyError" in source.readiness().reasons[0]
        answers["d:1"] = READY
        await asked_again(source)
        assert source.readiness().pairs
