"""What the bodies of both generating endpoints share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from services.router.openai.policy import (
    Alternatives,
    CheckedBody,
    Count,
    Positive,
    Whole,
    checked_text,
    whole_number,
)
from services.router.openai.structure import ResponseFormat, StructuredOutputs
from sluice.errors import BadRequest
from sluice.types import Sampling

_MAX_STOPS = 16
_STOP_SCHEMA: dict[str, Any] = {"items": {"minLength": 1}, "maxItems": _MAX_STOPS}
_BIAS_SCHEMA: dict[str, Any] = {
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
    "additionalProperties": {"minimum": -100, "maximum": 100},
}
TopK = Annotated[int, Field(ge=-1, lt=1 << 31), BeforeValidator(whole_number)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(CheckedBody):
    """``continuous_usage_stats`` is an extension: usage so far in every chunk of the choice."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(CheckedBody):
    """Fields of both endpoints. Those after ``stream_options`` are extensions."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = Field(default=None, json_schema_extra=_BIAS_SCHEMA)
    n: Positive | None = None
    best_of: Positive | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = Field(default=None, json_schema_extra=_STOP_SCHEMA)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    top_k: TopK | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Whole] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Alternatives | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    timeout_s: float | None = Field(default=None, gt=0)
    return_token_ids: bool | None = None

    @field_validator("stop")
    @classmethod
    def _usable_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > _MAX_STOPS:
            raise ValueError(f"at most {_MAX_STOPS} stop strings")
        if not all(stops) and value != "":
            raise ValueError("a stop string is empty")
        for stop in stops:
            checked_text(stop)
        return value

    @field_validator("logit_bias")
    @classmethod
    def _usable_biases(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (value or {}).items():
            if not (token.isascii() and token.isdecimal() and len(token) < 10):
                raise ValueError(f"{token!r} is no token id")
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias {bias:g} of token {token} is not in -100..100")
        if len({int(token) for token in value or {}}) != len(value or {}):
            raise ValueError("names a token twice")
        return value

    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    def biases(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items())

    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def wants_running_usage(self) -> bool:
        """As in vLLM, only together with ``include_usage``."""
        options = self.stream_options
        return self.wants_usage() and options is not None and bool(options.continuous_usage_stats)

    def answer_logprobs(self) -> int | None:
        """How many alternatives beside each token of the answer; None without logprobs."""
        raise NotImplementedError

    def scored_prompt(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    def check_together(self) -> None:
        """Fields that don't fit one another. Raises `BadRequest`."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise BadRequest(
                f"best_of is {self.best_of} with n {self.n or 1}: choosing among more answers "
                "is not supported",
                field="best_of",
                remedy="leave best_of out",
            )
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options only goes with stream", field="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest(
                "prompt_logprobs can't be streamed",
                field="prompt_logprobs",
                remedy="leave stream out, or use echo with logprobs",
            )

    def sampling(
        self, max_tokens: int, eos_token_ids: tuple[int, ...], drawn_seed: int
    ) -> Sampling:
        """OpenAI's defaults: temperature 1. ``drawn_seed`` serves when none is given."""
        eos = () if self.ignore_eos else eos_token_ids
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            seed=drawn_seed if self.seed is None else self.seed % (1 << 64),
            stop_token_ids=tuple(dict.fromkeys((*(self.stop_token_ids or ()), *eos))),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=(
                1.0 if self.repetition_penalty is None else self.repetition_penalty
            ),
            logit_bias=self.biases(),
            logprobs=self.answer_logprobs(),
            prompt_logprobs=self.scored_prompt(),
        )
