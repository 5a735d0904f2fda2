"""Choice of a pair from what decode pods say; no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from services.router import pairing
from services.router.pairing import Pair, StaticPairing
from sluice.errors import DeadlineExceeded, NotReady, PeerLost
from sluice.rpc.messages import DecodeStatus, PeerStatus
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


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, DecodeStatus | Exception]:
    table: dict[str, DecodeStatus | Exception] = {}
    monkeypatch.setattr(_Client, "answers", table, raising=False)
    monkeypatch.setattr(pairing, "DecodeClient", _Client)
    return table


@asynccontextmanager
async def _running(
    *decodes: str, prefills: tuple[str, ...] = (), refresh_s: float = 0.02
) -> AsyncIterator[StaticPairing]:
    source = StaticPairing(decodes, prefills, refresh_s)
    await source.start()
    try:
        yield source
    finally:
        await source.stop()


@pytest.mark.asyncio
async def test_only_agreed_pairs_count(answers: dict[str, DecodeStatus | Exception]) -> None:
    answers["d:1"] = _peers(("p:1", "agreed"), ("p:2", "refused"), ("p:3", "lost"))
    answers["d:2"] = replace(_peers(("p:1", "agreed")), ready=False, reason="draining")
    answers["d:3"] = PeerLost("no route")
    async with _running("d:1", "d:2", "d:3") as source:
        seen = source.readiness()
    assert seen.pairs == (Pair("d:1", "p:1"),)
    text = "; ".join(seen.reasons)
    for part in ("p:2 is refused", "p:3 is lost", "draining", "no route"):
        assert part in text


@pytest.mark.asyncio
async def test_no_pair_is_not_ready_and_says_why(
    answers: dict[str, DecodeStatus | Exception],
) -> None:
    answers["d:1"] = PeerLost("no route")
    async with _running("d:1") as source:
        with pytest.raises(NotReady, match="no route"), source.lease():
            pass


@pytest.mark.asyncio
async def test_leases_spread_over_decodes_and_prefills(
    answers: dict[str, DecodeStatus | Exception],
) -> None:
    peers = _peers(("p:1", "agreed"), ("p:2", "agreed"))
    answers |= {"d:1": peers, "d:2": peers}
    async with _running("d:1", "d:2") as source:
        with ExitStack() as leases:
            pairs = [leases.enter_context(source.lease()).pair for _ in range(4)]
        assert sorted(pair.decode for pair in pairs) == ["d:1", "d:1", "d:2", "d:2"]
        assert sorted(pair.prefill for pair in pairs) == ["p:1", "p:1", "p:2", "p:2"]
        assert set(source._running.values()) == {0}


@pytest.mark.asyncio
async def test_a_prefill_is_free_after_the_first_token(
    answers: dict[str, DecodeStatus | Exception],
) -> None:
    answers["d:1"] = _peers(("p:1", "agreed"), ("p:2", "agreed"))
    async with _running("d:1") as source:
        with source.lease() as first:
            first.prefill_done()
            first.prefill_done()
            with source.lease() as second, source.lease() as third:
                assert second.pair != first.pair  # equally free: the one picked longer ago
                assert third.pair == first.pair


@pytest.mark.asyncio
async def test_reported_load_counts(answers: dict[str, DecodeStatus | Exception]) -> None:
    agreed = _peers(("p:1", "agreed"))
    answers |= {"d:1": replace(agreed, queued=3, running=2), "d:2": replace(agreed, running=4)}
    async with _running("d:1", "d:2") as source:
        with source.lease() as lease:
            assert lease.pair.decode == "d:2"


@pytest.mark.asyncio
async def test_avoided_pairs_come_last(answers: dict[str, DecodeStatus | Exception]) -> None:
    agreed = _peers(("p:1", "agreed"))
    answers |= {"d:1": agreed, "d:2": replace(agreed, running=50)}
    async with _running("d:1", "d:2") as source:
        with source.lease(avoid=[Pair("d:1", "p:1")]) as lease:
            assert lease.pair.decode == "d:2"
        with source.lease(avoid=[Pair("d:1", "p:1"), Pair("d:2", "p:1")]) as lease:
            assert lease.pair.decode == "d:1"


@pytest.mark.asyncio
async def test_a_lost_pod_comes_back(answers: dict[str, DecodeStatus | Exception]) -> None:
    answers["d:1"] = PeerLost("down")
    async with _running("d:1") as source:
        assert source.readiness().pairs == ()
        answers["d:1"] = READY
        source.suspect(Pair("d:1", "x"))  # looks again at once, whatever the back-off
        await asyncio.sleep(0.01)
        assert len(source.readiness().pairs) == 1
        assert source.max_model_tokens() == READY.max_model_tokens


async def _asked_again(source: StaticPairing, times: int = 1) -> None:
    client = source._decodes["d:1"].client
    assert isinstance(client, _Client)
    for _ in range(times):
        before = client.asked
        source.suspect(Pair("d:1", "x"))
        async with asyncio.timeout(2):
            while client.asked == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.mark.asyncio
async def test_a_busy_pod_that_answers_late_is_not_lost_at_once(
    answers: dict[str, DecodeStatus | Exception],
) -> None:
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
async def test_a_lost_pods_limit_stays_known(
    answers: dict[str, DecodeStatus | Exception],
) -> None:
    answers["d:1"] = READY
    async with _running("d:1", refresh_s=60.0) as source:
        answers["d:1"] = PeerLost("down")
        await _asked_again(source)
        assert source.readiness().pairs == ()
        assert source.max_model_tokens() == READY.max_model_tokens


@pytest.mark.asyncio
async def test_a_bug_in_a_refresh_does_not_end_the_watch(
    answers: dict[str, DecodeStatus | Exception],
) -> None:
    answers["d:1"] = READY
    async with _running("d:1") as source:
        answers["d:1"] = KeyError("bug")
        await asyncio.sleep(0.1)
        assert "KeyError" in source.readiness().reasons[0]
        answers["d:1"] = READY
        source.suspect(Pair("d:1", "x"))
        await asyncio.sleep(0.01)
        assert source.readiness().pairs
