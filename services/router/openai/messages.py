"""The turns of a chat's body."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from services.router.openai.policy import MESSAGE_OFF, CheckedBody, Off, checked_text
from services.router.openai.tool_schema import SentCall
from sluice.errors import BadRequest
from sluice.text.chat import Message

_CONTENT_FORMS = "must be a string or a list of text parts"
_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA: list[Any] = [
    {"type": "string"},
    {"type": "array", "items": _PART_SCHEMA, "minItems": 1},
    {"type": "null"},
]
_TALKING = {"content": {"type": ["string", "array"]}, "tool_calls": {"maxItems": 0}}
_CALLING = {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}}
_MESSAGE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"properties": _TALKING, "required": ["content"]},
        {"properties": _CALLING, "required": ["tool_calls"]},
    ]
}


class ChatMessage(CheckedBody):
    """One turn. Text parts are joined by line breaks."""

    model_config = ConfigDict(json_schema_extra=_MESSAGE_SCHEMA)
    off: ClassVar[Off] = MESSAGE_OFF

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[SentCall] | None = None
    tool_call_id: str | None = None
    content: Any = Field(
        default=None, validate_default=True, json_schema_extra={"anyOf": _CONTENT_SCHEMA}
    )

    @field_validator("content")
    @classmethod
    def _known_form(cls, value: Any, info: ValidationInfo) -> Any:
        """Only calls can do without it."""
        if value is not None or not info.data.get("tool_calls"):
            text_of(value)
        return value

    @field_validator("name", "reasoning_content", "tool_call_id")
    @classmethod
    def _valid_text(cls, value: str | None) -> str | None:
        return None if value is None else checked_text(value)

    @model_validator(mode="after")
    def _fits_its_role(self) -> ChatMessage:
        try:
            self.check_extra()
        except BadRequest as error:
            raise ValueError(error.message) from error
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        return self

    def turn(self) -> Message:
        return Message(
            self.role,
            "" if self.content is None else text_of(self.content),
            self.name,
            self.reasoning_content,
            tuple(call.call() for call in self.tool_calls or ()),
            self.tool_call_id,
        )


def text_of(content: Any) -> str:
    """The text of a message's ``content``. Raises ValueError for anything but text."""
    if isinstance(content, str):
        return checked_text(content)
    if not isinstance(content, list) or not content:
        raise ValueError(_CONTENT_FORMS)
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if not isinstance(part, dict):
        raise ValueError(_CONTENT_FORMS)
    if part.get("type") != "text":
        raise ValueError(f"a part of type {part.get('type')!r} is not supported, only text is")
    if not isinstance(part.get("text"), str):
        raise ValueError("a text part has no text")
    return checked_text(part["text"])
