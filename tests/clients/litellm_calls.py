"""litellm: both of its providers for such servers, streams, tools, its own error classes."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import litellm

COMMON: Any = {
    "api_base": os.environ["SLUICE_URL"] + "/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "Hello?"}],
    "temperature": 0,
    "max_tokens": 400,
}
MODEL = os.environ["SLUICE_MODEL"]
PARAMETERS = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
TOOL = {"type": "function", "function": {"name": "switch", "parameters": PARAMETERS}}
for provider in ("hosted_vllm", "openai"):
    name = f"{provider}/{MODEL}"
    whole = litellm.completion(model=name, **COMMON)
    assert whole.usage.completion_tokens > 0
    options = {"include_usage": True}
    chunks = list(litellm.completion(model=name, stream=True, stream_options=options, **COMMON))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    called = litellm.completion(model=name, tools=[TOOL], tool_choice="required", **COMMON)
    assert called.choices[0].message.tool_calls[0].function.name == "switch"
    try:
        litellm.completion(model=f"{provider}/gpt-5", **COMMON)
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("an unknown model was served")
print(f"{version('litellm')}: hosted_vllm/ and openai/, stream, tools, errors")
