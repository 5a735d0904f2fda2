"""langchain-openai: invoke, stream, structured output both ways, a tool's round trip."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Verdict(BaseModel):
    """A verdict."""

    answer: Literal["yes", "no"]
    sure: bool


@tool
def switch(on: bool) -> str:
    """Switch the light."""
    return "on" if on else "off"


model = ChatOpenAI(
    base_url=os.environ["SLUICE_URL"] + "/v1",
    model=os.environ["SLUICE_MODEL"],
    temperature=0,
    max_tokens=600,
)
whole = model.invoke("Hello?")
assert whole.response_metadata["token_usage"]["completion_tokens"] > 0
assert "".join(str(chunk.content) for chunk in model.stream("Hello?")) == whole.content
for method in ("json_schema", "function_calling"):
    verdict = model.with_structured_output(Verdict, method=method).invoke("Well?")
    assert isinstance(verdict, Verdict), method
asked = model.bind_tools([switch], tool_choice="switch").invoke("Light!")
(call,) = asked.tool_calls
assert call["name"] == "switch"
result = ToolMessage(switch.invoke(call["args"]), tool_call_id=call["id"])
assert model.bind_tools([switch]).invoke([HumanMessage("Light!"), asked, result]).response_metadata
print(f"{version('langchain-openai')}: invoke, stream, json_schema, function_calling, tool results")
