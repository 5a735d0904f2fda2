"""The stock openai client against the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from sluice.errors import BadRequest, Overloaded, PeerLost, TransferFailed
from sluice.types import FinishReason
from tests.integration.router_harness import (
    MODEL,
    TEMPLATE,
    ScriptedDecode,
    fails,
    hangs,
    router_over,
    says,
    until,
)

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


_MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
]


@asynccontextmanager
async def _async_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="x", max_retries=0, http_client=http
    ) as client:
        yield client


@pytest.mark.asyncio
async def test_chat() -> None:
    def use(client: openai.OpenAI) -> ChatCompletion:
        return client.chat.completions.create(
            model=MODEL, messages=_MESSAGES, max_completion_tokens=5, n=2, seed=1
        )

    async with router_over(ScriptedDecode([says("Hello", " world")]), template=TEMPLATE) as stack:
        chat = await _with_client(stack.url, use)
    assert [choice.index for choice in chat.choices] == [0, 1]
    for choice in chat.choices:
        assert (choice.message.role, choice.message.content) == ("assistant", "Hello world")
        assert choice.finish_reason == "length"
        assert choice.message.tool_calls is None
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (5, 8)
    assert chat._request_id == chat.id


@pytest.mark.asyncio
async def test_chat_stream_with_its_own_accumulator() -> None:
    def use(client: openai.OpenAI) -> tuple[list[str], ChatCompletion]:
        with client.chat.completions.stream(
            model=MODEL, messages=_MESSAGES, stream_options={"include_usage": True}
        ) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            return deltas, stream.get_final_completion()

    # The client's accumulator raises an error of its own when "length" ended the answer.
    decode = ScriptedDecode([says("Hello", " world", reason=FinishReason.STOP)])
    async with router_over(decode, template=TEMPLATE) as stack:
        # The client sends its answer back in the next turn: its nulls mustn't be refused.
        deltas, final = await _with_client(stack.url, use)
        turns = [*_MESSAGES, final.choices[0].message.model_dump()]
        again = await stack.http.post("/v1/chat/completions", json={"messages": turns})
    assert "".join(deltas) == "Hello world"
    assert final.choices[0].message.content == "Hello world"
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert final.usage.total_tokens == 9
    assert again.status_code == 200, again.text


@pytest.mark.asyncio
async def test_async_chat_whole_and_streamed() -> None:
    async with (
        router_over(ScriptedDecode([says("Hello", " world")]), template=TEMPLATE) as stack,
        _async_client(stack.url) as client,
    ):
        whole = await client.chat.completions.create(model=MODEL, messages=_MESSAGES)
        stream = await client.chat.completions.create(model=MODEL, messages=_MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == "Hello world"
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "Hello world"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.asyncio
async def test_async_completions_with_two_answers() -> None:
    async with (
        router_over(ScriptedDecode([says("Hello", " world")])) as stack,
        _async_client(stack.url) as client,
    ):
        whole = await client.completions.create(model=MODEL, prompt="hi", n=2)
        stream = await client.completions.create(model=MODEL, prompt="hi", n=2, stream=True)
        texts = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert [choice.text for choice in whole.choices] == texts == ["Hello world"] * 2


@pytest.mark.asyncio
async def test_an_async_client_that_closes_its_stream_cancels_the_pod() -> None:
    decode = ScriptedDecode([hangs("some")])
    async with (
        router_over(decode, template=TEMPLATE) as stack,
        _async_client(stack.url) as client,
    ):
        stream = await client.chat.completions.create(model=MODEL, messages=_MESSAGES, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: decode.open == 0, 2.0)


@pytest.mark.asyncio
async def test_no_template_and_a_bad_tool_are_bad_requests_with_param() -> None:
    async with (
        router_over(ScriptedDecode([says("x")])) as stack,
        _async_client(stack.url) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="no chat template") as template:
            await client.chat.completions.create(model=MODEL, messages=_MESSAGES)
        with pytest.raises(openai.BadRequestError, match="letters") as tools:
            await client.chat.completions.create(
                model=MODEL,
                messages=_MESSAGES,
                tools=[{"type": "function", "function": {"name": "f f"}}],
            )
    assert (template.value.param, tools.value.param) == ("messages", "tools[0].function.name")
    assert template.value.request_id
    assert template.value.request_id != tools.value.request_id


@pytest.mark.asyncio
async def test_async_error_in_a_chat_stream_raises() -> None:
    decode = ScriptedDecode([fails(TransferFailed("it broke"), "some")])
    async with (
        router_over(decode, template=TEMPLATE) as stack,
        _async_client(stack.url) as client,
    ):
        stream = await client.chat.completions.create(model=MODEL, messages=_MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="it broke"):
            async for _ in stream:
                pass


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
