"""More requests than pods take: waiting in turn, 429 with an honest Retry-After, and refusals that cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from sluice.errors import NotReady, PeerLost, StaleEpoch
from sluice.rpc.messages import Finished, GenerateCall, Tokens
from sluice.types import FinishReason
from tests.integration.router_harness import (
    READY,
    USAGE,
    Event,
    ScriptedDecode,
    fails,
    hangs,
    ids,
    router_over,
    says,
    until,
)

pytestmark = pytest.mark.asyncio


class Counting(ScriptedDecode):
    """Knows how many calls were open at once."""

    def __init__(self, capacity: int) -> None:
        super().__init__([self.answer], replace(READY, capacity=capacity))
        self.most = 0

    async def answer(self, _: GenerateCall) -> AsyncIterator[Event]:
        self.most = max(self.most, self.open)
        await asyncio.sleep(0.02)
        yield Tokens(ids("x"))
        yield Finished(FinishReason.STOP, USAGE)


async def test_forty_requests_on_a_pod_that_takes_four() -> None:
    decode = Counting(4)
    async with router_over(decode) as stack:
        answers = await asyncio.gather(*(stack.post(prompt="a") for _ in range(40)))
    assert {answer.status_code for answer in answers} == {200}
    assert decode.most == 4
    assert len(decode.calls) == 40


async def test_what_the_queue_cannot_hold_gets_429_and_when_to_come_back() -> None:
    decode = Counting(1)
    async with router_over(decode, max_waiting=3) as stack:
        answers = await asyncio.gather(*(stack.post(prompt="a") for _ in range(10)))
    statuses = [answer.status_code for answer in answers]
    assert sorted(set(statuses)) == [200, 429]
    assert statuses.count(200) >= 4
    refused = answers[statuses.index(429)]
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-should-retry"] == "true"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert len(decode.calls) == statuses.count(200), "who was refused touched no pod"


async def test_a_client_that_leaves_the_queue_is_no_ones_load() -> None:
    decode = ScriptedDecode([hangs("a"), says("fine")], replace(READY, capacity=1))
    async with router_over(decode, max_waiting=1) as stack:
        first = asyncio.create_task(stack.post(prompt="hi"))
        await until(lambda: decode.open == 1)
        second = asyncio.create_task(stack.post(prompt="hi", stream=True))
        await asyncio.sleep(0.1)
        assert (await stack.post(prompt="hi")).status_code == 429
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await asyncio.sleep(0.1)
        third = asyncio.create_task(stack.post(prompt="hi"))
        await asyncio.sleep(0.1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert (await third).status_code == 200
    assert len(decode.calls) == 2


async def test_a_deadline_covers_the_wait() -> None:
    decode = ScriptedDecode([hangs("a")], replace(READY, capacity=1))
    async with router_over(decode) as stack:
        first = asyncio.create_task(stack.post(prompt="hi"))
        await until(lambda: decode.open == 1)
        answer = await stack.post(prompt="hi", timeout_s=0.3)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert answer.status_code == 504
    assert "waiting for a pair" in answer.json()["error"]["message"]


@pytest.mark.parametrize("error", [NotReady("shutting down"), StaleEpoch("another life")])
async def test_pods_that_refuse_are_passed_over_until_one_takes_it(error: Exception) -> None:
    """Three pods on their way out at once used up the one retry, and the client saw it."""
    leaving = [ScriptedDecode([fails(error)]) for _ in range(3)]
    taking = ScriptedDecode([says("fine")], replace(READY, running=50))
    async with router_over(*leaving, taking) as stack:
        answer = await stack.post(prompt="hi")
        attempts = stack.attempts()
    assert answer.status_code == 200
    assert len(attempts) == len(set(attempts)) == 4


async def test_a_failure_after_refusals_still_has_its_retry() -> None:
    leaving = ScriptedDecode([fails(NotReady("shutting down"))])
    failing = ScriptedDecode([fails(PeerLost("gone"))], replace(READY, running=1))
    taking = ScriptedDecode([says("fine")], replace(READY, running=50))
    async with router_over(leaving, failing, taking) as stack:
        assert (await stack.post(prompt="hi")).status_code == 200


async def test_every_pod_refusing_ends_in_503() -> None:
    decodes = [ScriptedDecode([fails(NotReady("shutting down"))]) for _ in range(2)]
    async with router_over(*decodes) as stack:
        answer = await stack.post(prompt="hi")
    assert answer.status_code == 503
    assert sum(len(decode.calls) for decode in decodes) <= 3


async def test_attempts_name_the_lives_and_the_agreement_they_are_for() -> None:
    decode = ScriptedDecode([says("x")])
    async with router_over(decode) as stack:
        await stack.post(prompt="hi")
    call = decode.calls[0]
    assert (call.decode_epoch, call.prefill_epoch) == ("e1", "p1")
