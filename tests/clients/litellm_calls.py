"""litellm: both of its providers for such servers, sync and async, streams, tools, text, its own error classes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import litellm

HELLO = [{"role": "user", "content": "Hello?"}]
COMMON: Any = {
    "api_base": os.environ["SLUICE_URL"] + "/v1",
    "api_key": os.environ["OPENAI_API_KEY"],
    "messages": HELLO,
    "temperature": 0,
    "max_tokens": 400,
    "num_retries": 0,
}
MODEL = os.environ["SLUICE_MODEL"]
PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,  # else this model would go on with others
}
TOOLS: Any = {
    "tools": [{"type": "function", "function": {"name": "switch", "parameters": PARAMETERS}}],
    "tool_choice": "required",
}
SCHEMA: Any = {"name": "light", "schema": PARAMETERS, "strict": True}


def refused(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def check(name: str) -> None:
    whole = litellm.completion(model=name, **COMMON)
    text = whole.choices[0].message.content
    chunks = list(
        litellm.completion(
            model=name, stream=True, stream_options={"include_usage": True}, **COMMON
        )
    )
    assert text == "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    built = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert built.choices[0].message.content == text
    assert built.usage.completion_tokens == whole.usage.completion_tokens > 0
    assert built.usage.prompt_tokens == whole.usage.prompt_tokens > 0
    called = litellm.completion(model=name, **TOOLS, **COMMON)
    (call,) = called.choices[0].message.tool_calls[:1]
    assert call.function.name == "switch"
    assert isinstance(json.loads(call.function.arguments)["on"], bool)
    form = {"type": "json_schema", "json_schema": SCHEMA}
    formed = litellm.completion(model=name, response_format=form, **COMMON)
    assert isinstance(json.loads(formed.choices[0].message.content)["on"], bool)
    assert asyncio.run(litellm.acompletion(model=name, **COMMON)).choices[0].message.content == text


def errors(provider: str) -> None:
    name = f"{provider}/{MODEL}"
    refused(litellm.NotFoundError, lambda: litellm.completion(model=f"{provider}/nobody", **COMMON))
    stranger = {**COMMON, "api_key": "sk-nobody"}
    refused(litellm.AuthenticationError, lambda: litellm.completion(model=name, **stranger))
    long = {**COMMON, "messages": [{"role": "user", "content": "word " * 20_000}]}
    refused(litellm.ContextWindowExceededError, lambda: litellm.completion(model=name, **long))
    odd: Any = {**COMMON, "extra_body": {"guided_regex": "a+"}}
    refused(litellm.BadRequestError, lambda: litellm.completion(model=name, **odd))


for provider in ("hosted_vllm", "openai"):
    check(f"{provider}/{MODEL}")
    errors(provider)
prompt = {key: value for key, value in COMMON.items() if key != "messages"}
text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="def f(", **prompt)
assert text.choices[0].text
print(
    f"{version('litellm')}: hosted_vllm/ and openai/, acompletion, stream rebuilt with usage, tools, "
    "json_schema, text_completion, four error classes"
)
