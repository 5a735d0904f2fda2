"""What the bodies of both generating endpoints share, and the bodies about models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, field_validator

from services.router.openai.policy import CheckedBody, checked_text
from sluice.types import Sampling

_MAX_STOPS = 16
StopReason = Literal["stop", "length"]


class StreamOptions(BaseModel):
    include_usage: bool = False


class GenerationRequest(CheckedBody):
    """Fields of both endpoints. Those after ``stream_options`` are extensions."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
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

    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

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
            seed=drawn_seed if self.seed is None else self.seed % (1 << 64),
            stop_token_ids=tuple(dict.fromkeys((*(self.stop_token_ids or ()), *eos))),
            ignore_eos=bool(self.ignore_eos),
        )


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class ServingDetails(BaseModel):
    """Extension: how the answer was made. Seconds are of the slowest choice, counts are sums."""

    verify_steps: int
    accepted_drafts: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    transferred_bytes: int


class UsageBody(BaseModel):
    """``prompt_tokens_details`` is null when a stop string cut the answer before prefill reported."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    sluice: ServingDetails


class Steps(BaseModel):
    """``token_ids`` and ``accepted_drafts`` (one entry a step) come with ``return_token_ids`` only."""

    token_ids: list[int] | None = None
    accepted_drafts: list[int | None] | None = None


class Answer(BaseModel):
    """What a whole answer and a chunk of a stream have in common."""

    id: str
    object: str
    created: int
    model: str


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "sluice"
    max_model_len: int | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
