"""The stock openai client against the router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import httpx
import openai
import pytest

from sluice.errors import BadRequest, Overloaded, PeerLost, TransferFailed
from tests.integration.router_harness import MODEL, ScriptedDecode, fails, router_over, says

T = TypeVar("T")


async def _with_client(url: str, use: Callable[[openai.OpenAI], T]) -> T:
    """Run blocking ``use`` beside the server's loop."""

    def run() -> T:
        http = httpx.Client(trust_env=False)
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key="x", max_retries=0, http_client=http
        ) as client:
            return use(client)

    return await asyncio.to_thread(run)


@pytest.mark.asyncio
async def test_completion() -> None:
    async with router_over(ScriptedDecode([says("Hello", " world")])) as stack:
        completion = await _with_client(
            stack.url, lambda c: c.completions.create(model=MODEL, prompt="hi", max_tokens=5)
        )
    assert completion.choices[0].text == "Hello world"
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is None or (
        completion.usage.prompt_tokens_details.cached_tokens == 2
    )
    assert completion.usage.total_tokens == 9


@pytest.mark.asyncio
async def test_stream_with_usage() -> None:
    def use(client: openai.OpenAI) -> tuple[str, list[int]]:
        stream = client.completions.create(
            model=MODEL, prompt="hi", stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        return text, [chunk.usage.total_tokens for chunk in chunks if chunk.usage]

    async with router_over(ScriptedDecode([says("Hello", " world")])) as stack:
        assert await _with_client(stack.url, use) == ("Hello world", [9])


@pytest.mark.asyncio
async def test_models() -> None:
    async with router_over(ScriptedDecode([says("x")])) as stack:
        names = await _with_client(stack.url, lambda c: [m.id for m in c.models.list()])
        model = await _with_client(stack.url, lambda c: c.models.retrieve(MODEL))
    assert names == [MODEL]
    assert model.id == MODEL


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (BadRequest("no"), openai.BadRequestError),
        (Overloaded("full"), openai.RateLimitError),
        (PeerLost("gone"), openai.InternalServerError),
    ],
)
async def test_errors_have_the_clients_own_classes(
    error: Exception, raised: type[openai.APIStatusError]
) -> None:
    def use(client: openai.OpenAI) -> openai.APIStatusError:
        with pytest.raises(raised) as caught:
            client.completions.create(model=MODEL, prompt="hi")
        return caught.value

    async with router_over(ScriptedDecode([fails(error)])) as stack:
        got = await _with_client(stack.url, use)
    assert got.code == type(error).__name__
    assert str(error) in str(got)


@pytest.mark.asyncio
async def test_an_error_in_a_stream_raises() -> None:
    def use(client: openai.OpenAI) -> list[str]:
        stream = client.completions.create(model=MODEL, prompt="hi", stream=True)
        texts = [next(iter(stream)).choices[0].text]
        with pytest.raises(openai.APIError, match="it broke"):
            list(stream)
        return texts

    async with router_over(ScriptedDecode([fails(TransferFailed("it broke"), "some")])) as stack:
        assert await _with_client(stack.url, use) == ["some"]
