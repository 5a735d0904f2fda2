"""openai-python of any major: sync, async, streams, parse, tools, logprobs, embedded errors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, Literal

import openai
from pydantic import BaseModel

URL, MODEL = os.environ["SLUICE_URL"] + "/v1", os.environ["SLUICE_MODEL"]
MESSAGES: Any = [{"role": "user", "content": "Hello?"}]
SHORT: Any = {"model": MODEL, "temperature": 0, "max_tokens": 12}
LONG: Any = {"model": MODEL, "temperature": 0, "max_tokens": 600}


class Verdict(BaseModel):
    answer: Literal["yes", "no"]
    sure: bool


def sync(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **SHORT)
    assert chat.usage is not None
    assert chat.choices[0].logprobs is not None
    tokens = chat.choices[0].logprobs.content or []
    assert len(tokens) == chat.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    text = client.completions.create(prompt="def f(", echo=True, logprobs=1, **SHORT)
    assert text.choices[0].text.startswith("def f(")
    pieces = client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SHORT
    )
    chunks = list(pieces)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == chat.choices[0].message.content
    assert chunks[-1].usage == chat.usage or chunks[-1].usage is not None


def structured(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(messages=MESSAGES, response_format=Verdict, **LONG)
    assert isinstance(parsed.choices[0].message.parsed, Verdict)
    tool = openai.pydantic_function_tool(Verdict, name="judge")
    called = client.chat.completions.parse(
        messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False, **LONG
    )
    assert called.choices[0].finish_reason == "tool_calls"
    (call,) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Verdict)
    with client.chat.completions.stream(
        messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False, **LONG
    ) as stream:
        final = stream.get_final_completion()
    (again,) = final.choices[0].message.tool_calls or []
    assert again.function.parsed_arguments == call.function.parsed_arguments


def errors(client: openai.OpenAI) -> None:
    unknown = caught(
        openai.NotFoundError,
        lambda: client.chat.completions.create(model="gpt-5", messages=MESSAGES),
    )
    assert unknown.code == "model_not_found"
    body: Any = {"audio": {}}
    refused = caught(
        openai.BadRequestError,
        lambda: client.chat.completions.create(messages=MESSAGES, extra_body=body, **SHORT),
    )
    assert refused.param == "audio"


def caught(kind: type[openai.APIError], call: Callable[[], object]) -> openai.APIError:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


async def concurrent() -> None:
    async with openai.AsyncOpenAI(base_url=URL) as client:
        calls = [client.chat.completions.create(messages=MESSAGES, **SHORT) for _ in range(4)]
        answers = await asyncio.gather(*calls)
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        stream = await client.completions.create(prompt="a", stream=True, n=2, **SHORT)
        assert {choice.index async for chunk in stream for choice in chunk.choices} == {0, 1}


with openai.OpenAI(base_url=URL) as sync_client:
    sync(sync_client)
    structured(sync_client)
    errors(sync_client)
asyncio.run(concurrent())
print(f"{openai.__version__}: sync, async, stream, parse, tools, logprobs, errors")
