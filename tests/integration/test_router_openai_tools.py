"""Tools, schemas and logprobs through the stock openai client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam
from pydantic import BaseModel

from sluice.rpc.messages import Event, Finished, GenerateCall, Tokens
from sluice.types import FinishReason, GrammarKind, Logprobs, TokenLogprob
from tests.integration.router_harness import (
    MODEL,
    READY,
    TEMPLATE,
    USAGE,
    ScriptedDecode,
    Stack,
    ids,
    router_over,
    says,
)

_USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "weather?"}]
_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class City(BaseModel):
    name: str
    people: int


_TOOL: ChatCompletionFunctionToolParam = openai.pydantic_function_tool(City, name="weather")
_PLAIN_TOOL: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@asynccontextmanager
async def _client(*texts: str) -> AsyncIterator[tuple[openai.AsyncOpenAI, ScriptedDecode]]:
    script = says(*texts, reason=FinishReason.STOP)
    decode = ScriptedDecode([script], replace(READY, max_model_tokens=4000))
    async with (
        router_over(decode, template=TEMPLATE) as stack,
        _over(stack) as client,
    ):
        yield client, decode


@asynccontextmanager
async def _over(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="x", max_retries=0, http_client=http
    ) as client:
        yield client


@pytest.mark.asyncio
async def test_parse_into_a_model() -> None:
    async with _client('{"name": "Par', 'is", "people": 2}') as (client, decode):
        completion = await client.chat.completions.parse(
            model=MODEL, messages=_USER, response_format=City
        )
    assert completion.choices[0].message.parsed == City(name="Paris", people=2)
    grammar = decode.calls[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    assert '"people"' in grammar.text


@pytest.mark.asyncio
async def test_stream_into_a_model() -> None:
    async with (
        _client('{"name": "Par', 'is", "people": 2}') as (client, _),
        client.chat.completions.stream(model=MODEL, messages=_USER, response_format=City) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == City(name="Paris", people=2)


@pytest.mark.asyncio
async def test_a_parsed_call_and_its_result_in_the_next_turn() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"name": "Paris", "people": 2}}\n'
    async with _client(call, "</tool_call>") as (client, decode):
        completion = await client.chat.completions.parse(
            model=MODEL, messages=_USER, tools=[_TOOL], tool_choice="required"
        )
        (choice,) = completion.choices
        (made,) = choice.message.tool_calls or []
        again: Any = [*_USER, choice.message.model_dump(), _result(made.id)]
        await client.chat.completions.create(model=MODEL, messages=again, tools=[_TOOL])
    assert choice.finish_reason == "tool_calls"
    assert made.function.parsed_arguments == City(name="Paris", people=2)
    grammar = decode.calls[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK


@pytest.mark.asyncio
async def test_a_streamed_call_in_the_clients_own_accumulator() -> None:
    async with (
        _client("Hm. ", *_CALL) as (client, _),
        client.chat.completions.stream(model=MODEL, messages=_USER, tools=[_PLAIN_TOOL]) as stream,
    ):
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    (made,) = final.choices[0].message.tool_calls or []
    assert (made.function.name, made.function.arguments) == ("weather", '{"city": "Paris"}')
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_chat(stream: bool) -> None:
    async def script(_: GenerateCall) -> AsyncIterator[Event]:
        scores = [Logprobs(-0.5, (TokenLogprob(token, -0.5),)) for token in ids("Hey")]
        yield Tokens(ids("Hey"), None, tuple(scores))
        yield Finished(FinishReason.STOP, USAGE)

    async with (
        router_over(ScriptedDecode([script]), template=TEMPLATE) as stack,
        _over(stack) as client,
    ):
        options: dict[str, Any] = {"model": MODEL, "messages": _USER, "logprobs": True}
        answer: Any = await client.chat.completions.create(**options, top_logprobs=1, stream=stream)
        choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert [(token.token, token.logprob) for token in tokens] == [(c, -0.5) for c in "Hey"]
    assert [token.top_logprobs[0].bytes for token in tokens] == [[ord(c)] for c in "Hey"]


def _result(call_id: str) -> ChatCompletionMessageParam:
    return {"role": "tool", "tool_call_id": call_id, "content": "sunny"}
