"""Bodies of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from services.router.openai.logprobs import ChatLogprobs, PromptScores
from services.router.openai.messages import ChatMessage
from services.router.openai.policy import CHAT_OFF, Alternatives, Off, Positive
from services.router.openai.request_schema import GenerationRequest
from services.router.openai.schema import Answer, Steps, StopReason
from services.router.openai.tool_schema import (
    TOOL_CHOICE_SCHEMA,
    AnsweredCall,
    CallDelta,
    ToolBody,
    ToolChoice,
    parse_tool_choice,
)
from sluice.errors import BadRequest
from sluice.text.chat import Message
from sluice.text.tools import Tool

_HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_WEATHER = {"type": "function", "function": {"name": "weather", "parameters": _CITY}}
_FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY, "strict": True}}
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
_EXAMPLES: list[Any] = [
    {"messages": _HELLO, "max_tokens": 64},
    {"messages": _HELLO, "max_tokens": 64, "temperature": 0, **_STREAMED},
    {"messages": _HELLO, "max_tokens": 64, "tools": [_WEATHER], "tool_choice": "required"},
    {"messages": _HELLO, "max_tokens": 64, "response_format": _FORM},
]


class TemplateFields(Protocol):
    """What a body may say about rendering."""

    add_special_tokens: bool | None
    add_generation_prompt: bool | None
    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: str | None


@dataclass(frozen=True)
class Chat:
    """What a prompt is rendered from. A template writes its own special tokens unless told."""

    turns: tuple[Message, ...]
    tools: tuple[Tool, ...]
    add_special_tokens: bool
    add_generation_prompt: bool
    variables: Mapping[str, object]
    reasoning_effort: str | None

    @classmethod
    def of(
        cls, messages: Sequence[ChatMessage], tools: Sequence[Tool], fields: TemplateFields
    ) -> Chat:
        return cls(
            turns=tuple(message.turn() for message in messages),
            tools=tuple(tools),
            add_special_tokens=bool(fields.add_special_tokens),
            add_generation_prompt=fields.add_generation_prompt is not False,
            variables=fields.chat_template_kwargs or {},
            reasoning_effort=fields.reasoning_effort,
        )


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``. The last two fields are extensions."""

    model_config = ConfigDict(json_schema_extra={"examples": _EXAMPLES})
    off: ClassVar[Off] = CHAT_OFF

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Any = Field(default=None, json_schema_extra={"anyOf": TOOL_CHOICE_SCHEMA})
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("tool_choice")
    @classmethod
    def _known_choice(cls, value: Any) -> Any:
        parse_tool_choice(value)
        return value

    def choice_of_tools(self) -> ToolChoice:
        """Without tools there is nothing to call."""
        choice = parse_tool_choice(self.tool_choice)
        return choice or ToolChoice("auto" if self.tools else "none")

    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools the model hears of: none when it may call none."""
        if self.choice_of_tools().kind == "none":
            return ()
        return tuple(tool.tool() for tool in self.tools or ())

    def chat(self) -> Chat:
        return Chat.of(self.messages, self.callable_tools(), self)

    def answer_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def asked_tokens(self) -> int | None:
        """The answer's limit under either name; None when the body leaves it to the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check_together(self) -> None:
        super().check_together()
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise BadRequest(
                f"max_tokens is {old}, but max_completion_tokens is {new}",
                field="max_completion_tokens",
                remedy="send one of them",
            )
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs only goes with logprobs", field="top_logprobs")
        self._check_tool_choice()

    def _check_tool_choice(self) -> None:
        choice = parse_tool_choice(self.tool_choice)
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise BadRequest("two tools have the same name", field="tools")
        if choice is None or choice.kind in ("none", "auto"):
            return
        if not names:
            raise BadRequest("tool_choice only goes with tools", field="tool_choice")
        if choice.kind == "function" and choice.name not in names:
            raise BadRequest(f"no tool is called {choice.name!r}", field="tool_choice")


class AnswerMessage(BaseModel):
    """``reasoning_content`` and ``tool_calls`` are there when the model wrote some."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(Steps):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: StopReason


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptScores | None = None


class Delta(BaseModel):
    """``role`` comes once, in a choice's first chunk."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(Steps):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: StopReason | None


class ChatChunk(Answer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
