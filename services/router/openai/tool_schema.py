"""Tools in a chat's body, which of them may be called, and calls in answers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from services.router.openai.policy import CheckedBody, checked_text
from sluice.text.tools import Call, Tool

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NAME_SCHEMA: dict[str, Any] = {"pattern": f"^{_NAME.pattern}$"}
_NAMED_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
TOOL_CHOICE_SCHEMA: list[Any] = [{"enum": ["none", "auto", "required"]}, _NAMED_SCHEMA]


class FunctionBody(CheckedBody):
    """``strict`` holds the model to ``parameters`` also where it is free to call or not."""

    name: str = Field(json_schema_extra=_NAME_SCHEMA)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("name")
    @classmethod
    def _usable_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("a function's name is 1 to 128 letters, digits, _, - and .")
        return value


class ToolBody(CheckedBody):
    type: Literal["function"]
    function: FunctionBody

    def tool(self) -> Tool:
        function = self.function
        return Tool(
            name=function.name,
            parameters=json.dumps(function.parameters or {}),
            description=function.description,
            strict=bool(function.strict),
            given=json.dumps(self.model_dump(exclude_unset=True)),
        )


@dataclass(frozen=True)
class ToolChoice:
    """``kind`` is none, auto, required, or function: then it is the one called ``name``."""

    kind: Literal["none", "auto", "required", "function"]
    name: str = ""

    @property
    def forced(self) -> bool:
        return self.kind in ("required", "function")


def parse_tool_choice(value: Any) -> ToolChoice | None:
    """None when the body doesn't say. Raises ValueError for any other form."""
    match value:
        case None:
            return None
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("function", name)
    raise ValueError('must be "none", "auto", "required" or a function by its name')


class CalledFunction(BaseModel):
    """``arguments`` is JSON text; in a chunk, a piece of it."""

    name: str | None = None
    arguments: str | None = None


class AnsweredCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CallDelta(BaseModel):
    """``id``, ``type`` and the function's name come once, in a call's first chunk."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class SentFunction(CheckedBody):
    name: str
    arguments: str

    @field_validator("name", "arguments")
    @classmethod
    def _valid_text(cls, value: str) -> str:
        return checked_text(value)


class SentCall(CheckedBody):
    """A call in a chat's history."""

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: SentFunction

    @field_validator("id")
    @classmethod
    def _valid_text(cls, value: str) -> str:
        return checked_text(value)

    def call(self) -> Call:
        return Call(self.id, self.function.name, self.function.arguments)
