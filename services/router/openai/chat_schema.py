"""Bodies of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, Field, field_validator, model_validator

from services.router.openai.policy import CHAT_OFF, MESSAGE_OFF, CheckedBody, Off, checked_text
from services.router.openai.schema import Answer, GenerationRequest, Steps, StopReason, UsageBody
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
]


class ChatMessage(CheckedBody):
    """One turn. Text parts are joined by line breaks."""

    off: ClassVar[Off] = MESSAGE_OFF

    role: Literal["system", "developer", "user", "assistant"]
    content: Any = Field(json_schema_extra={"anyOf": _CONTENT_SCHEMA})
    name: str | None = None
    reasoning_content: str | None = None

    @field_validator("content")
    @classmethod
    def _known_form(cls, value: Any) -> Any:
        text_of(value)
        return value

    @field_validator("name", "reasoning_content")
    @classmethod
    def _valid_text(cls, value: str | None) -> str | None:
        return None if value is None else checked_text(value)

    @model_validator(mode="after")
    def _no_tools(self) -> ChatMessage:
        try:
            self.check_extra()
        except BadRequest as error:
            raise ValueError(error.message) from error
        return self

    def turn(self) -> Message:
        return Message(self.role, text_of(self.content), self.name, self.reasoning_content)


class TemplateFields(Protocol):
    """What a body may say about rendering."""

    add_special_tokens: bool | None
    add_generation_prompt: bool | None
    chat_template_kwargs: dict[str, Any] | None


@dataclass(frozen=True)
class Chat:
    """What a prompt is rendered from. A template writes its own special tokens unless told."""

    turns: tuple[Message, ...]
    add_special_tokens: bool
    add_generation_prompt: bool
    variables: Mapping[str, object]

    @classmethod
    def of(cls, messages: Sequence[ChatMessage], fields: TemplateFields) -> Chat:
        return cls(
            turns=tuple(message.turn() for message in messages),
            add_special_tokens=bool(fields.add_special_tokens),
            add_generation_prompt=fields.add_generation_prompt is not False,
            variables=fields.chat_template_kwargs or {},
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


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``. The last two fields are extensions."""

    off: ClassVar[Off] = CHAT_OFF

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> Chat:
        return Chat.of(self.messages, self)

    def asked_tokens(self) -> int | None:
        """The answer's limit under either name; None when the body leaves it to the context."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise BadRequest(
                f"max_tokens is {old}, but max_completion_tokens is {new}",
                field="max_completion_tokens",
                remedy="send one of them",
            )
        return old if new is None else new


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Steps):
    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: StopReason


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageBody | None = None


class Delta(BaseModel):
    """``role`` comes once, in a choice's first chunk."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(Steps):
    index: int
    delta: Delta
    logprobs: None
    finish_reason: StopReason | None


class ChatChunk(Answer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: UsageBody | None = None
