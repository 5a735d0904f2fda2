"""A server for tests of clients: it streams what a test says, and pauses where told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx


def streams(*events: object, bodies: list[object] | None = None) -> httpx.AsyncClient:
    """Each event is sent as JSON, text as it is; a number is a pause in seconds. ``bodies`` collects what was asked."""

    async def body() -> AsyncIterator[bytes]:
        for event in events:
            if isinstance(event, int | float):
                await asyncio.sleep(event)
                continue
            text = event if isinstance(event, str) else json.dumps(event)
            yield f"data: {text}\n\n".encode()

    def answer(request: httpx.Request) -> httpx.Response:
        if bodies is not None:
            bodies.append(json.loads(request.content))
        return httpx.Response(200, content=body())

    return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://r")


def text(words: str, *ids: int) -> dict[str, object]:
    return {"choices": [{"text": words, "token_ids": list(ids)}]}


def usage(prompt: int, completion: int) -> dict[str, object]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
