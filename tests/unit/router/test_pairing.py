"""Choice of a pair from what decode pods say; no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from services.discovery.registry import Source
from services.discovery.static import StaticSource
from services.router.fleet import Pair
from services.router.lease import Lease
from services.router.pairing import Pairing, PairingConfig
from services.router.policy import LeastLoad, Policy
from sluice.errors import DeadlineExceeded, NotReady, PeerLost
from sluice.rpc.messages import DecodeStatus, PeerStatus
from sluice.types import Epoch
from tests.integration.router_harness import READY


class _Client:
    """Stands for a decode client; ``answers`` by address."""

    answers: dict[str, DecodeStatus | Exception]

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked = 0

    async def get_status(self, timeout_s: float) -> DecodeStatus:
        self.asked += 1
        answer = self.answers[self.address]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        pass


def _peers(*states: tuple[str, str]) -> DecodeStatus:
    return replace(READY, peers=tuple(PeerStatus(a, "e", state) for a, state in states))


Answers = dict[str, DecodeStatus | Exception]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    table: Answers = {}
    monkeypatch.setattr(_Client, "answers", table, raising=False)
    return table


@asynccontextmanager
async def _running(
    *decodes: str,
    prefills: tuple[str, ...] = (),
    source: Source | None = None,
    policy: Policy | None = None,
    **config: object,
) -> AsyncIterator[Pairing]:
    chosen = PairingConfig(
        **{"refresh_s": 0.02, "pair_wait_s": 0.05, "any_prefill": not prefills, **config}  # type: ignore[arg-type]
    )
    source = source or StaticSource(prefills=prefills, decodes=decodes)
    pairing = Pairing(source, policy or LeastLoad(), chosen, _Client)  # type: ignore[arg-type]
    await pairing.start()
    try:
        yield pairing
    finally:
        await pairing.stop()


async def _lease(
    pairing: Pairing, leases: AsyncExitStack, *avoid: Pair, wait_s: float = 5
) -> Lease:
    deadline = asyncio.get_running_loop().time() + wait_s
    return await leases.enter_async_context(pairing.lease((1, 2, 3), deadline, avoid))


def _pair(decode: str, prefill: str) -> Pair:
    """As the statuses of these tests name it."""
    return Pair(decode, prefill, READY.epoch, Epoch("e"))


@pytest.mark.asyncio
async def test_only_agreed_pairs_count(answers: Answers) -> None:
    answers["d:1"] = _peers(("p:1", "agreed"), ("p:2", "refused"), ("p:3", "lost"))
    answers["d:2"] = replace(_peers(("p:1", "agreed")), ready=False, reason="draining")
    answers["d:3"] = PeerLost("no route")
    async with _running("d:1", "d:2", "d:3") as source:
        seen = source.readiness()
    assert seen.pairs == (_pair("d:1", "p:1"),)
    text = "; ".join(seen.reasons)
    for part in ("p:2 is refused", "p:3 is lost", "draining", "no route"):
        assert part in text


@pytest.mark.asyncio
async def test_no_pair_is_not_ready_and_says_why(answers: Answers) -> None:
    answers["d:1"] = PeerLost("no route")
    async with _running("d:1") as pairing, AsyncExitStack() as leases:
        with pytest.raises(NotReady, match="no route") as caught:
            await _lease(pairing, leases)
    assert caught.value.retry_after_s


@pytest.mark.asyncio
async def test_leases_spread_over_decodes_and_prefills(answers: Answers) -> None:
    peers = _peers(("p:1", "agreed"), ("p:2", "agreed"))
    answers |= {"d:1": peers, "d:2": peers}
    async with _running("d:1", "d:2") as pairing:
        async with AsyncExitStack() as leases:
            pairs = [(await _lease(pairing, leases)).pair for _ in range(4)]
            assert pairing.view().in_flight == 4
        assert sorted(pair.decode for pair in pairs) == ["d:1", "d:1", "d:2", "d:2"]
        assert sorted(pair.prefill for pair in pairs) == ["p:1", "p:1", "p:2", "p:2"]
        assert {pod.in_flight for pod in pairing.view().pods} == {0}


@pytest.mark.asyncio
async def test_a_prefill_is_free_after_the_first_token(answers: Answers) -> None:
    answers["d:1"] = _peers(("p:1", "agreed"), ("p:2", "agreed"))
    async with _running("d:1") as pairing, AsyncExitStack() as leases:
        first = await _lease(pairing, leases)
        first.prefill_done()
        first.prefill_done()
        second, third = await _lease(pairing, leases), await _lease(pairing, leases)
        assert second.pair != first.pair  # equally free: the one picked longer ago
        assert third.pair == first.pair


@pytest.mark.asyncio
async def test_reported_load_counts(answers: Answers) -> None:
    agreed = _peers(("p:1", "agreed"))
    answers |= {"d:1": replace(agreed, queued=3, running=2), "d:2": replace(agreed, running=4)}
    async with _running("d:1", "d:2") as pairing, AsyncExitStack() as leases:
        assert (await _lease(pairing, leases)).pair.decode == "d:2"


@pytest.mark.asyncio
async def test_avoided_pairs_come_last(answers: Answers) -> None:
    agreed = _peers(("p:1", "agreed"))
    answers |= {"d:1": agreed, "d:2": replace(agreed, running=50)}
    async with _running("d:1", "d:2") as pairing, AsyncExitStack() as leases:
        first, second = _pair("d:1", "p:1"), _pair("d:2", "p:1")
        assert (await _lease(pairing, leases, first)).pair == second
        assert (await _lease(pairing, leases, first, second)).pair == first


@pytest.mark.asyncio
async def test_a_lost_pod_comes_back(answers: Answers) -> None:
    answers["d:1"] = PeerLost("down")
    async with _running("d:1") as source:
        assert source.readiness().pairs == ()
        answers["d:1"] = READY
        await _asked_again(source)  # at once, whatever the back-off
        assert len(source.readiness().pairs) == 1
        assert source.max_model_tokens() == READY.max_model_tokens


async def _asked_again(source: Pairing, times: int = 1) -> None:
    """What a failed attempt brings about."""
    watch = source._watches["d:1"]
    client = watch.client
    assert isinstance(client, _Client)
    for _ in range(times):
        before = client.asked
        watch.look_again()
        async with asyncio.timeout(2):
            while client.asked == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_busy_pod_that_answers_late_is_not_lost_at_once(answers: Answers) -> None:
    """A step of a large model on a loaded machine outlasts the status call; new clients got 503."""
    answers["d:1"] = READY
    async with _running("d:1", refresh_s=60.0) as source:
        answers["d:1"] = DeadlineExceeded("late")
        await _asked_again(source, 2)
        assert source.readiness().pairs
        answers["d:1"] = READY
        await _asked_again(source)
        answers["d:1"] = DeadlineExceeded("late")
        await _asked_again(source, 2)
        assert source.readiness().pairs, "an answer in time starts the count anew"
        await _asked_again(source)
        assert source.readiness().reasons == ("decode d:1: late",)


@pytest.mark.asyncio
async def test_a_lost_pods_limit_stays_known(answers: Answers) -> None:
    answers["d:1"] = READY
    async with _running("d:1", refresh_s=60.0) as source:
        answers["d:1"] = PeerLost("down")
        await _asked_again(source)
        assert source.readiness().pairs == ()
        assert source.max_model_tokens() == READY.max_model_tokens


@pytest.mark.asyncio
async def test_a_bug_in_a_refresh_does_not_end_the_watch(answers: Answers) -> None:
    answers["d:1"] = READY
    async with _running("d:1") as source:
        answers["d:1"] = KeyError("bug")
        await asyncio.sleep(0.1)
        assert "KeyError" in source.readiness().reasons[0]
        answers["d:1"] = READY
        await _asked_again(source)
        assert source.readiness().pairs
