"""Bodies of ``/v1/completions``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator

from services.router.openai.logprobs import PromptScores, TextLogprobs
from services.router.openai.policy import (
    COMPLETION_OFF,
    Alternatives,
    Off,
    checked_text,
    whole_number,
)
from services.router.openai.request_schema import GenerationRequest
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

_EXAMPLES: list[Any] = [
    {"prompt": "Once upon a time", "max_tokens": 32},
    {"prompt": ["One", "Two"], "max_tokens": 32, "n": 2, "temperature": 0.7, "seed": 1},
    {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 0},
]


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``. ``max_tokens`` 0 reads the prompt and writes nothing."""

    model_config = ConfigDict(json_schema_extra={"examples": _EXAMPLES})
    off: ClassVar[Off] = COMPLETION_OFF

    prompt: Any = Field(json_schema_extra={"anyOf": _PROMPT_SCHEMA})
    echo: bool | None = None
    logprobs: Alternatives | None = None

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
    if (ids := _ids(value)) is not None:
        return (ids,)
    return tuple(_one_prompt(item) for item in value)


def _one_prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return checked_text(value)
    if isinstance(value, list) and value and (ids := _ids(value)) is not None:
        return ids
    raise ValueError(_PROMPT_FORMS)


def _ids(values: list[Any]) -> tuple[int, ...] | None:
    """None unless all are integers."""
    ids = tuple(map(whole_number, values))
    return ids if all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in ids) else None


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
