"""Bodies of ``/v1/completions``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from services.router.openai.logprobs import PromptScores, TextLogprobs
from services.router.openai.policy import COMPLETION_OFF, Off, checked_text
from services.router.openai.request_schema import MAX_ALTERNATIVES, GenerationRequest
from services.router.openai.schema import Answer, Steps, StopReason

Prompt = str | tuple[int, ...]
DEFAULT_MAX_TOKENS = 16  # OpenAI's
_PROMPT_FORMS = "must be a string, token ids, or a list of those"
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA: list[Any] = [
    {"type": "string"},
    _IDS_SCHEMA,
    {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS_SCHEMA]}, "minItems": 1},
]


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``. ``max_tokens`` 0 reads the prompt and writes nothing."""

    off: ClassVar[Off] = COMPLETION_OFF

    prompt: Any = Field(json_schema_extra={"anyOf": _PROMPT_SCHEMA})
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)

    @field_validator("prompt")
    @classmethod
    def _known_form(cls, value: Any) -> Any:
        parse_prompts(value)
        return value

    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts, each a text or token ids; at least one."""
        return parse_prompts(self.prompt)

    def answer_logprobs(self) -> int | None:
        return self.logprobs

    def scored_prompt(self) -> int | None:
        """An echo has the prompt's logprobs too, when there are any."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)


def parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """All prompts of a body's ``prompt``. Raises ValueError for any other form."""
    if isinstance(value, str):
        return (checked_text(value),)
    if not isinstance(value, list) or not value:
        raise ValueError(_PROMPT_FORMS)
    if all(_is_id(item) for item in value):
        return (tuple(value),)
    return tuple(_one_prompt(item) for item in value)


def _one_prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return checked_text(value)
    if isinstance(value, list) and value and all(_is_id(item) for item in value):
        return tuple(value)
    raise ValueError(_PROMPT_FORMS)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Choice(Steps):
    """``prompt_logprobs`` only when the body asked for them."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: StopReason | None = None
    prompt_logprobs: PromptScores | None = None


class Completion(Answer):
    """A whole answer, or one chunk of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[Choice]
