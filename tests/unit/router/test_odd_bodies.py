"""Whatever a client sends, it hears 200 or what is wrong with it; never a 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.app import create_app
from services.router.openai.completion_schema import CompletionRequest
from services.router.openai.policy import COMPLETION_OFF
from services.router.pairing import Lease, Pair, Readiness
from services.router.settings import RouterSettings
from sluice.rpc.client import DecodeClient
from sluice.rpc.messages import Finished, GenerateCall, Tokens
from sluice.types import FinishReason
from tests.integration.router_harness import MODEL, TOKENIZER, USAGE

_PAIR = Pair("d:1", "p:1")


class _Client:
    async def generate(self, call: GenerateCall) -> AsyncGenerator[Tokens | Finished]:
        yield Tokens(call.prompt[:3])
        yield Finished(FinishReason.LENGTH, USAGE)


class _OnePair:
    """Always ready, no sockets."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def readiness(self) -> Readiness:
        return Readiness((_PAIR,), ())

    def max_model_tokens(self) -> int:
        return 200

    @contextmanager
    def lease(self, avoid: Collection[Pair] = ()) -> Iterator[Lease]:
        yield Lease(_PAIR, cast("DecodeClient", _Client()), lambda: None)

    def suspect(self, pair: Pair) -> None: ...


_APP = create_app(
    RouterSettings(model_dir=Path("unused"), model_name=MODEL, decodes=("d:1",)),
    TOKENIZER,
    _OnePair(),
)


def _post(content: bytes) -> httpx.Response:
    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(_APP)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            headers = {"content-type": "application/json"}
            return await client.post("/v1/completions", content=content, headers=headers)

    return asyncio.run(post())


_NAMES = st.sampled_from([*CompletionRequest.model_fields, *COMPLETION_OFF, "user", "made_up"])
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=())),  # lone surrogates too
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(_NAMES, _VALUES, max_size=6), st.booleans())
def test_any_json_gets_an_answer_or_a_reason(body: dict[str, object], with_prompt: bool) -> None:
    if with_prompt:
        body["prompt"] = "hi"
    response = _post(json.dumps(body).encode())
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_get_a_reason(content: bytes) -> None:
    assert _post(content).status_code in (200, 400)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ["\\udfff"]}',
        b"NaN",
        b"",
    ],
)
def test_bodies_that_break_parsers(content: bytes) -> None:
    response = _post(content)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
