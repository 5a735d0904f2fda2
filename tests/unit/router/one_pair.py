"""The router in this process over one pair that is always ready: no sockets, no pods."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
from fastapi import FastAPI

from services.router.app import create_app
from services.router.fleet import FleetView, Pair
from services.router.lease import Lease, Readiness
from services.router.settings import RouterSettings
from sluice.rpc.client import DecodeClient
from sluice.rpc.messages import Event, Finished, GenerateCall, Tokens
from sluice.text.chat import ChatTemplate
from sluice.text.tokenizer import ModelTokenizer
from sluice.types import FinishReason
from tests.integration.router_harness import MODEL, TEMPLATE, TOKENIZER, USAGE, sse_events, steps

_PAIR = Pair("d:1", "p:1")


class StubDecode:
    """Tokens that depend on the prompt, the seed and nothing else, a few a step."""

    def __init__(self) -> None:
        self.calls: list[GenerateCall] = []

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Tokens | Finished]:
        self.calls.append(call)
        draw = random.Random(f"{call.prompt} {call.sampling.seed}")
        left = min(call.sampling.max_tokens, draw.randint(1, 12))
        drafted = None
        while left > 0:
            count = min(left, draw.randint(1, 3))
            # Letters, so that what is one text is also one row of ids.
            step = TOKENIZER.encode("".join(draw.choices("abc", k=count)), add_special_tokens=False)
            yield Tokens(step, drafted)
            left, drafted = left - count, count - 1
            await asyncio.sleep(0)
        yield Finished(FinishReason.LENGTH, USAGE)


class ToldDecode:
    """Says the same to every call; an exception among the events is raised."""

    def __init__(self, *events: Event | Exception) -> None:
        self.events = events
        self.calls: list[GenerateCall] = []

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Event]:
        self.calls.append(call)
        for event in self.events:
            if isinstance(event, Exception):
                raise event
            yield event
            await asyncio.sleep(0)


def told(*texts: str, reason: FinishReason = FinishReason.STOP) -> ToldDecode:
    """One step a text, then the end."""
    return ToldDecode(*steps(*texts), Finished(reason, USAGE))


class OnePair:
    """A `PairSource` with one pair."""

    def __init__(self, decode: StubDecode | ToldDecode, limit: int) -> None:
        self._decode = decode
        self._limit = limit
        self.draining = False

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def readiness(self) -> Readiness:
        return Readiness((_PAIR,), ())

    def max_model_tokens(self) -> int:
        return self._limit

    def view(self) -> FleetView:
        return FleetView(version=1, problem="", pods=(), pairs=(), waiting=0, in_flight=0)

    @asynccontextmanager
    async def lease(
        self, prompt: tuple[int, ...], deadline: float, avoid: Collection[Pair] = ()
    ) -> AsyncIterator[Lease]:
        yield Lease(_PAIR, cast("DecodeClient", self._decode))


def app_over(
    decode: StubDecode | ToldDecode,
    template: ChatTemplate | None = TEMPLATE,
    tokenizer: ModelTokenizer = TOKENIZER,
    max_model_tokens: int = 200,
    **settings: object,
) -> FastAPI:
    chosen = RouterSettings.model_validate(
        {"model_dir": Path("unused"), "model_name": MODEL, "decodes": ("d:1",), **settings}
    )
    return create_app(chosen, tokenizer, OnePair(decode, max_model_tokens), template)


def post(app: FastAPI, path: str, content: bytes) -> httpx.Response:
    """One request in a loop of its own, for tests that hypothesis repeats."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            headers = {"content-type": "application/json"}
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(send())


def ask(app: FastAPI, path: str, **body: object) -> Any:
    """The parsed answer: of a stream its events, "[DONE]" and all. Not for errors."""
    response = post(app, path, json.dumps(body).encode())
    assert response.status_code == 200, response.text
    return sse_events(response) if body.get("stream") else response.json()
