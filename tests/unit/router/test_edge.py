"""The edge: every answer has the router's id, and a body has a size and a time to arrive in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Message

from services.router.body import BodyLimit
from tests.unit.router.one_pair import StubDecode, app_over

_BODY = json.dumps({"prompt": "hi"}).encode()
_HEADERS = {"content-type": "application/json", "x-request-id": "mine"}


class _Broken(StubDecode):
    async def generate(self, call: Any) -> Any:
        raise KeyError("bug")
        yield


def _client(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://router", headers=_HEADERS)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/completions", _BODY, 200),
        ("POST", "/v1/completions", b"{nope", 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "n": 0}', 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "model": "b"}', 404),
        ("POST", "/v1/completions", b'{"prompt": "' + b"a" * 1000 + b'"}', 413),
        ("GET", "/v1/completions", b"", 405),
        ("GET", "/v1/nothing", b"", 404),
        ("GET", "/health", b"", 200),
        ("GET", "/openapi.json", b"", 200),
    ],
)
async def test_every_answer_has_an_id_of_the_routers_own(
    method: str, path: str, content: bytes, status: int
) -> None:
    async with _client(app_over(StubDecode(), max_body_bytes=200)) as client:
        first, second = [await client.request(method, path, content=content) for _ in range(2)]
    assert first.status_code == status
    ids = {first.headers["x-request-id"], second.headers["x-request-id"]}
    assert len(ids) == 2
    assert "mine" not in ids
    if status >= 400:
        assert set(first.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore")
async def test_a_bug_has_its_id_too() -> None:
    async with _client(app_over(_Broken())) as client:
        response = await client.post("/v1/completions", content=_BODY)
    assert response.status_code == 500
    assert response.headers["x-request-id"].startswith("cmpl-")
    assert "KeyError" in response.json()["error"]["message"]


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 10):
        yield body[start : start + 10]


@pytest.mark.asyncio
@pytest.mark.parametrize("stated", [True, False])
async def test_the_limit_is_exact(stated: bool) -> None:
    async with _client(app_over(StubDecode(), max_body_bytes=len(_BODY))) as client:
        fits, over = [
            await client.post("/v1/completions", content=body if stated else _chunks(body))
            for body in (_BODY, _BODY + b" ")
        ]
    assert (fits.status_code, over.status_code) == (200, 413)
    error = over.json()["error"]
    assert (error["code"], error["type"]) == ("BodyTooLarge", "invalid_request_error")
    assert str(len(_BODY)) in error["message"]


async def _through_limit(
    incoming: list[Message], timeout_s: float = 5.0, stated_bytes: int | None = None
) -> list[Message]:
    """What the limit sends for these messages; an application behind it echoes its body."""
    sent: list[Message] = []
    seen: list[Message] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(await receive())
        seen.append(await receive())

    async def receive() -> Message:
        return incoming.pop(0) if incoming else await asyncio.sleep(60, {})

    async def send(message: Message) -> None:
        sent.append(message)

    limit = BodyLimit(app, max_body_bytes=100, body_timeout_s=timeout_s)
    stated = [] if stated_bytes is None else [(b"content-length", str(stated_bytes).encode())]
    await limit({"type": "http", "headers": stated}, receive, send)
    return sent or seen


@pytest.mark.asyncio
async def test_a_body_that_says_it_is_too_large_is_not_waited_for() -> None:
    start, _ = await _through_limit([], stated_bytes=101)
    assert start["status"] == 413


@pytest.mark.asyncio
async def test_a_body_that_does_not_come_is_a_408() -> None:
    part = {"type": "http.request", "body": b"{", "more_body": True}
    start, body = await _through_limit([part], timeout_s=0.05)
    assert start["status"] == 408
    assert json.loads(body["body"])["error"]["code"] == "BodyTooSlow"


@pytest.mark.asyncio
async def test_a_client_that_leaves_within_its_body_reaches_nothing() -> None:
    part = {"type": "http.request", "body": b"{", "more_body": True}
    assert await _through_limit([part, {"type": "http.disconnect"}]) == []


@pytest.mark.asyncio
async def test_the_application_sees_one_body_and_then_what_follows() -> None:
    parts = [
        {"type": "http.request", "body": b"ab", "more_body": True},
        {"type": "http.request", "body": b"c"},
        {"type": "http.disconnect"},
    ]
    body, after = await _through_limit(parts)
    assert body == {"type": "http.request", "body": b"abc", "more_body": False}
    assert after == {"type": "http.disconnect"}
