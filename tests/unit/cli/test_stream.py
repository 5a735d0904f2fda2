"""A streamed answer read as a client must: chunks, usage, and every way it can fail."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from sluice.cli.stream import AnswerFailed, Chunk, Serving, UsageSeen, stream_answer


def _client(
    *events: object, status: int = 200, error: Exception | None = None
) -> httpx.AsyncClient:
    async def body() -> AsyncIterator[bytes]:
        for event in events:
            text = event if isinstance(event, str) else json.dumps(event)
            yield f"data: {text}\n\n".encode()
        if error is not None:
            raise error

    def answer(_: httpx.Request) -> httpx.Response:
        if status != 200:
            return httpx.Response(status, json=events[0])
        return httpx.Response(200, content=body())

    return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://r")


async def _read(client: httpx.AsyncClient) -> list[Chunk]:
    async with client:
        return [chunk async for chunk in stream_answer(client, "/v1/completions", {})]


@pytest.mark.asyncio
async def test_completions_and_chats_and_usage() -> None:
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
        "sluice": {"verify_steps": 1, "accepted_drafts": 1, "queue_s": 0.1, "new": 1},
    }
    chunks = await _read(
        _client(
            {"choices": [{"text": "a", "token_ids": [7, 8], "finish_reason": None}], "usage": None},
            {"choices": [{"delta": {"role": "assistant", "content": "b"}}]},
            {"choices": [{"delta": {"reasoning_content": "hm"}}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
            "[DONE]",
        )
    )
    assert chunks == [
        Chunk("a", num_tokens=2),
        Chunk("b"),
        Chunk("", "hm"),
        Chunk("", finish_reason="stop"),
        Chunk("", num_tokens=0, usage=UsageSeen(5, 3, 2, Serving(1, 1, (("queue", 0.1),)))),
    ]


@pytest.mark.asyncio
async def test_another_server_says_less() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    *_, last = await _read(_client({"choices": [], "usage": usage}, "[DONE]"))
    assert last.usage == UsageSeen(5, 3, None, None)


_OVERLOADED = {"error": {"message": "full", "code": "Overloaded"}}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("client", "kind"),
    [
        (_client(_OVERLOADED, status=429), "429 Overloaded"),
        (_client("no json", status=502), "502"),
        (_client({"choices": [{"text": "a"}]}, _OVERLOADED), "in mid-stream: Overloaded"),
        (_client({"choices": [{"text": "a"}]}), "cut short"),
        (_client("{nope"), "not OpenAI's format"),
        (_client("[1]"), "not OpenAI's format"),
        (_client({"choices": [{"text": "a"}]}, error=httpx.ReadError("gone")), "connection"),
        (_client(error=httpx.ReadTimeout("slow")), "timeout"),
    ],
)
async def test_each_failure_has_its_kind(client: httpx.AsyncClient, kind: str) -> None:
    with pytest.raises(AnswerFailed) as caught:
        await _read(client)
    assert caught.value.kind == kind
