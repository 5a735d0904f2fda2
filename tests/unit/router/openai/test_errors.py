"""Mistakes of a first try: no content-type (what curl sends with -d), no /v1 in a client's base URL."""

from __future__ import annotations

import httpx
import pytest

from tests.unit.router.one_pair import StubDecode, app_over


async def _send(path: str, **request: object) -> httpx.Response:
    transport = httpx.ASGITransport(app_over(StubDecode()))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        return await client.post(path, **request)  # type: ignore[arg-type]


@pytest.mark.asyncio
@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
async def test_a_body_that_is_not_called_json(headers: dict[str, str]) -> None:
    response = await _send("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "send content-type: application/json" in message
    assert headers.get("content-type", "no content-type") in message


@pytest.mark.asyncio
async def test_an_unknown_path_says_what_was_asked_and_where_to_look() -> None:
    response = await _send("/chat/completions", json={"messages": []})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "unknown_url")
    assert "POST /chat/completions" in error["message"]
    assert "/v1" in error["message"]
