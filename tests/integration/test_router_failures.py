"""What the router does when pods fail and clients leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from sluice.errors import BadRequest, DeadlineExceeded, Overloaded, PeerLost, TransferFailed
from sluice.rpc.messages import Finished, GenerateCall, Tokens
from sluice.types import FinishReason
from tests.integration.router_harness import (
    MODEL,
    READY,
    USAGE,
    Event,
    ScriptedDecode,
    fails,
    hangs,
    ids,
    peer,
    router_over,
    says,
    until,
)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retryable_failure_is_tried_once_more_with_a_new_attempt(stream: bool) -> None:
    decode = ScriptedDecode([fails(TransferFailed("lost bytes")), says("fine")])
    async with router_over(decode) as stack:
        response = await stack.post(prompt="hi", stream=stream, seed=3)
    assert response.status_code == 200
    assert "fine" in response.text
    first, second = decode.calls
    assert first.attempt_id != second.attempt_id
    assert first.request_id == second.request_id
    assert first.sampling == second.sampling
    assert second.timeout_s < first.timeout_s


@pytest.mark.asyncio
async def test_a_whole_answer_may_be_retried_after_tokens_came() -> None:
    decode = ScriptedDecode([fails(PeerLost("gone"), "half"), says("whole")])
    async with router_over(decode) as stack:
        body = (await stack.post(prompt="hi")).json()
    assert body["choices"][0]["text"] == "whole"


@pytest.mark.asyncio
async def test_held_back_text_was_not_sent_so_a_stream_may_be_retried() -> None:
    decode = ScriptedDecode([fails(PeerLost("gone"), "EN"), says("fine")])
    async with router_over(decode) as stack:
        response = await stack.post(prompt="hi", stop="END", stream=True)
    assert "fine" in response.text
    assert "EN" not in response.text.replace("END", "")
    assert len(decode.calls) == 2


@pytest.mark.asyncio
async def test_retries_end() -> None:
    decode = ScriptedDecode([fails(TransferFailed("lost bytes"))])
    async with router_over(decode) as stack:
        response = await stack.post(prompt="hi")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "TransferFailed"
    assert len(decode.calls) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [BadRequest("no"), DeadlineExceeded("late")])
async def test_what_cannot_help_is_not_retried(error: Exception) -> None:
    decode = ScriptedDecode([fails(error), says("x")])
    async with router_over(decode) as stack:
        response = await stack.post(prompt="hi")
    assert response.status_code in (400, 504)
    assert len(decode.calls) == 1


@pytest.mark.asyncio
async def test_overload_is_not_retried_on_the_same_pair_but_on_another() -> None:
    full = ScriptedDecode([fails(Overloaded("full"))])
    async with router_over(full) as stack:
        assert (await stack.post(prompt="hi")).status_code == 429
    assert len(full.calls) == 1
    full = ScriptedDecode([fails(Overloaded("full"))])
    free = ScriptedDecode([says("fine")], replace(READY, running=5))
    async with router_over(full, free) as stack:
        response = await stack.post(prompt="hi")
    assert response.status_code == 200
    assert (len(full.calls), len(free.calls)) == (1, 1)


@pytest.mark.asyncio
async def test_a_dead_decode_pod_costs_one_attempt_on_the_other() -> None:
    dead = ScriptedDecode([fails(PeerLost("prefill is gone"))])
    alive = ScriptedDecode([says("fine")], replace(READY, running=9))
    async with router_over(dead, alive) as stack:
        response = await stack.post(prompt="hi")
        attempts = stack.attempts()
    assert response.json()["choices"][0]["text"] == "fine"
    assert len(set(attempts)) == 2


@pytest.mark.asyncio
async def test_clients_cannot_choose_ids() -> None:
    async with router_over(ScriptedDecode([says("x")])) as stack:
        response = await stack.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "a", "request_id": "mine", "attempt_id": "mine"},
            headers={"x-request-id": "mine"},
        )
        call = stack.decode.calls[0]
    assert response.status_code == 200
    assert "mine" not in (call.request_id, call.attempt_id, response.headers["x-request-id"])


@pytest.mark.asyncio
async def test_load_is_spread() -> None:
    async def slow(_: GenerateCall) -> AsyncIterator[Event]:
        yield Tokens(ids("x"))
        await asyncio.sleep(0.3)
        yield Finished(FinishReason.STOP, USAGE)

    decodes = [ScriptedDecode([slow]), ScriptedDecode([slow])]
    async with router_over(*decodes) as stack:
        answers = await asyncio.gather(*(stack.post(prompt="a") for _ in range(6)))
    assert all(answer.status_code == 200 for answer in answers)
    assert [len(decode.calls) for decode in decodes] == [3, 3]


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("texts", [(), ("some",)])
async def test_a_client_that_leaves_cancels_the_pod_at_once(
    stream: bool, texts: tuple[str, ...]
) -> None:
    decode = ScriptedDecode([hangs(*texts)])
    async with router_over(decode) as stack:
        request = asyncio.create_task(stack.post(prompt="hi", stream=stream))
        await until(lambda: decode.open > 0)
        await asyncio.sleep(0.1)
        left = time.monotonic()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await asyncio.wait_for(decode.closed.wait(), 2.0)
        assert time.monotonic() - left < 1.0
        assert decode.open == 0
        decode.scripts = [says("next")]
        assert (await stack.post(prompt="hi")).status_code == 200


@pytest.mark.asyncio
async def test_one_failing_prompt_of_a_list_cancels_the_others() -> None:
    decode = ScriptedDecode([hangs("x"), fails(BadRequest("no")), hangs("x")])
    async with router_over(decode) as stack:
        response = await asyncio.wait_for(stack.post(prompt=["a", "b"]), 5.0)
        await until(lambda: decode.open == 0, 2.0)
    assert response.status_code == 400


@pytest.mark.asyncio
async def test_one_deadline_covers_everything() -> None:
    decode = ScriptedDecode([hangs()])
    async with router_over(decode) as stack:
        started = time.monotonic()
        response = await stack.post(prompt="hi", timeout_s=0.5)
    assert response.status_code == 504
    assert time.monotonic() - started < 2.5
    assert decode.calls[0].timeout_s <= 0.5


@pytest.mark.asyncio
async def test_a_clients_time_is_capped() -> None:
    decode = ScriptedDecode([says("x")])
    async with router_over(decode, max_timeout_s=3.0) as stack:
        await stack.post(prompt="hi", timeout_s=1000)
    assert decode.calls[0].timeout_s <= 3.0


@pytest.mark.asyncio
async def test_only_listed_prefills_are_used() -> None:
    decode = ScriptedDecode([says("x")], peer("stranger.test:1"))
    async with router_over(decode, prefills=("known.test:1",)) as stack:
        ready = (await stack.http.get("/ready")).json()
    assert not ready["ready"]
    assert "known.test:1 is unknown" in ready["reasons"][0]


@pytest.mark.asyncio
async def test_a_pod_that_comes_back_is_seen() -> None:
    decode = ScriptedDecode([says("x")], replace(READY, ready=False, reason="loading"))
    async with router_over(decode, refresh_s=0.1) as stack:
        assert "loading" in (await stack.http.get("/ready")).json()["reasons"][0]
        decode.status = READY
        await asyncio.sleep(1.0)
        assert (await stack.http.get("/ready")).status_code == 200
        assert (await stack.post(prompt="hi")).status_code == 200


@pytest.mark.asyncio
async def test_an_unreachable_pod_is_named() -> None:
    async with router_over(decodes=("127.0.0.1:9",)) as stack:
        ready = (await stack.http.get("/ready")).json()
        answer = await stack.post(prompt="hi")
    assert "127.0.0.1:9" in ready["reasons"][0]
    assert answer.status_code == 503
