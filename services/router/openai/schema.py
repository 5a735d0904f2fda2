"""What answers of both generating endpoints share, and the bodies about models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

StopReason = Literal["stop", "length", "tool_calls"]


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
    """``prompt_tokens_details`` is null when an answer was cut before prefill reported.

    ``sluice`` is only there when all answers have ended.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    sluice: ServingDetails | None = None


class Steps(BaseModel):
    """``token_ids`` and ``accepted_drafts`` (one entry a step) come with ``return_token_ids`` only."""

    token_ids: list[int] | None = None
    accepted_drafts: list[int | None] | None = None


class Answer(BaseModel):
    """What a whole answer and a chunk of a stream have in common. Fields that aren't set aren't sent."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: UsageBody | None = None


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "sluice"
    max_model_len: int | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
