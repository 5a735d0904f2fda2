"""langchain-openai: invoke, batch, streams (async too), structured output both ways, tools, its error classes."""

from __future__ import annotations

import asyncio
import os
from functools import reduce
from importlib.metadata import version
from operator import add
from typing import Literal

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class Verdict(BaseModel):
    """A verdict. Closed: an open object may go on with other fields, and this model would."""

    model_config = ConfigDict(extra="forbid")
    answer: Literal["yes", "no"]
    sure: bool


@tool
def switch(on: bool) -> str:
    """Switch the light."""
    return "on" if on else "off"


URL = os.environ["SLUICE_URL"] + "/v1"
model = ChatOpenAI(
    base_url=URL, model=os.environ["SLUICE_MODEL"], temperature=0, max_tokens=600, stream_usage=True
)
whole = model.invoke("Hello?")
assert whole.usage_metadata is not None
assert whole.usage_metadata["output_tokens"] > 0
assert whole.response_metadata["finish_reason"] in ("stop", "length")
streamed = reduce(add, model.stream("Hello?"))
assert streamed.content == whole.content
assert streamed.usage_metadata is not None
for count in ("input_tokens", "output_tokens", "total_tokens"):
    assert streamed.usage_metadata[count] == whole.usage_metadata[count], count
assert [answer.content for answer in model.batch(["Hello?", "Hello?"])] == [whole.content] * 2
scored = model.bind(logprobs=True, top_logprobs=2, max_tokens=4).invoke("Hello?")
assert len(scored.response_metadata["logprobs"]["content"]) == 4
for method in ("json_schema", "function_calling"):
    for strict in (None, True):
        wanted = model.with_structured_output(Verdict, method=method, strict=strict)
        assert isinstance(wanted.invoke("Well?"), Verdict), (method, strict)
bound = model.bind_tools([switch], tool_choice="switch")
asked = bound.invoke("Light!")
(call,) = asked.tool_calls
assert call["name"] == "switch"
(pieced,) = reduce(add, bound.stream("Light!")).tool_calls
assert pieced["args"] == call["args"]
result = ToolMessage(switch.invoke(call["args"]), tool_call_id=call["id"])
assert model.bind_tools([switch]).invoke([HumanMessage("Light!"), asked, result]).response_metadata


async def later() -> str:
    return "".join([str(chunk.content) async for chunk in model.astream("Hello?")])


assert asyncio.run(later()) == whole.content
try:
    model.invoke("word " * 20_000)
except ContextOverflowError:
    pass
else:
    raise AssertionError("a chat that doesn't fit was served")
print(
    f"{version('langchain-openai')}: invoke, batch, stream, astream, usage, logprobs, json_schema, "
    "function_calling, tool results, ContextOverflowError"
)
