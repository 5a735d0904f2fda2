"""openai-python of any major: sync, async, streams, parse, tools, logprobs, errors, leaving early."""

from __future__ import annotations

import asyncio
import math
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


TOOLS: Any = {
    "tools": [openai.pydantic_function_tool(Verdict, name="judge")],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


def chats(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    raw = client.chat.completions.with_raw_response.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2, **SHORT
    )
    chat = raw.parse()
    assert raw.headers["x-request-id"] == chat.id
    assert chat.usage is not None
    assert chat.choices[0].logprobs is not None
    tokens = chat.choices[0].logprobs.content or []
    assert len(tokens) == chat.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    assert all(token.logprob == token.top_logprobs[0].logprob for token in tokens), "not greedy"
    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SHORT
        )
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == chat.choices[0].message.content
    assert [chunk for chunk in chunks if chunk.usage] == chunks[-1:]
    assert counts(chunks[-1].usage) == counts(chat.usage)
    dice: Any = {**SHORT, "temperature": 1, "n": 2}
    drawn = [client.chat.completions.create(messages=MESSAGES, seed=7, **dice) for _ in range(2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in drawn]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def completions(client: openai.OpenAI) -> None:
    text = client.completions.create(prompt="def f(", echo=True, logprobs=1, **SHORT)
    assert text.choices[0].text.startswith("def f(")
    again = client.completions.create(prompt=text.choices[0].text, echo=True, logprobs=1, **SHORT)
    read, written = again.choices[0].logprobs, text.choices[0].logprobs
    assert read is not None and written is not None  # noqa: PT018
    known = [score for score in written.token_logprobs or [] if score is not None]
    # What decode wrote is read by prefill, which scores it alike.
    for one, other in zip(known, (read.token_logprobs or [])[1:], strict=False):
        assert other is not None
        assert math.isclose(one, other, abs_tol=1e-3), (one, other)
    whole = text.choices[0].text.removeprefix("def f(")
    stop = whole[3:5]
    cut = client.completions.create(prompt="def f(", stop=stop, **SHORT)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == whole[: whole.index(stop)]
    many = client.completions.create(prompt=["def f(", "def f("], **SHORT)
    assert [choice.text for choice in many.choices] == [whole, whole]


def structured(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(messages=MESSAGES, response_format=Verdict, **LONG)
    assert isinstance(parsed.choices[0].message.parsed, Verdict)
    called = client.chat.completions.parse(messages=MESSAGES, **TOOLS, **LONG)
    assert called.choices[0].finish_reason == "tool_calls"
    (call,) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Verdict)
    with client.chat.completions.stream(messages=MESSAGES, **TOOLS, **LONG) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    (again,) = final.choices[0].message.tool_calls or []
    assert again.function.parsed_arguments == call.function.parsed_arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "noted"}
    history: Any = [*MESSAGES, called.choices[0].message.model_dump(), result]
    assert client.chat.completions.create(messages=history, **SHORT).choices


def errors(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    unknown = caught(openai.NotFoundError, lambda: create(model="gpt-5", messages=MESSAGES))
    assert unknown.code == "model_not_found"
    body: Any = {"audio": {}}
    refused = caught(
        openai.BadRequestError, lambda: create(messages=MESSAGES, extra_body=body, **SHORT)
    )
    assert refused.param == "audio"
    long: Any = [{"role": "user", "content": "word " * 20_000}]
    overflow = caught(openai.BadRequestError, lambda: create(messages=long, **SHORT))
    assert overflow.code == "context_length_exceeded"
    stranger = client.with_options(api_key="sk-nobody").chat.completions
    caught(openai.AuthenticationError, lambda: stranger.create(messages=MESSAGES, **SHORT))
    hasty = client.with_options(timeout=0.05, max_retries=0).chat.completions
    caught(openai.APITimeoutError, lambda: hasty.create(messages=MESSAGES, **LONG))


def caught(kind: type[openai.APIError], call: Callable[[], object]) -> openai.APIError:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def counts(usage: Any) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


async def concurrent() -> None:
    async with openai.AsyncOpenAI(base_url=URL) as client:
        calls = [client.chat.completions.create(messages=MESSAGES, **SHORT) for _ in range(4)]
        answers = await asyncio.gather(*calls)
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        stream = await client.completions.create(prompt="a", stream=True, n=2, **SHORT)
        assert {choice.index async for chunk in stream for choice in chunk.choices} == {0, 1}
        async with client.chat.completions.stream(
            messages=MESSAGES, response_format=Verdict, **LONG
        ) as parsed:
            final = await parsed.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Verdict)
        left = await client.chat.completions.create(messages=MESSAGES, stream=True, **LONG)
        await anext(aiter(left))
        await left.close()
        assert await client.chat.completions.create(messages=MESSAGES, **SHORT)


with openai.OpenAI(base_url=URL) as sync_client:
    for check in (chats, completions, structured, errors):
        check(sync_client)
asyncio.run(concurrent())
print(
    f"{openai.__version__}: sync, async, streams, parse, tools, logprobs read and written alike, "
    "stop, n, seed, errors, leaving early"
)
