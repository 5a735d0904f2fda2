"""Which requests the engine takes at all, checked before anything is queued."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sluice.config import EngineConfig
from sluice.errors import BadRequest
from sluice.models.base import ModelInfo
from sluice.types import Request, Sampling


@dataclass(frozen=True)
class RequestLimits:
    max_model_tokens: int
    vocab_size: int

    @classmethod
    def of(cls, info: ModelInfo, config: EngineConfig) -> RequestLimits:
        return cls(min(info.max_model_tokens, config.max_model_tokens), info.vocab_size)

    def check(self, request: Request) -> None:
        """Raise ``BadRequest`` that names the field and both values."""
        prompt_tokens, max_tokens = len(request.prompt), request.sampling.max_tokens
        if prompt_tokens == 0:
            raise BadRequest("the prompt has 0 tokens, needs at least 1", field="prompt")
        if max_tokens < 1:
            raise BadRequest(f"max_tokens is {max_tokens}, needs at least 1", field="max_tokens")
        if prompt_tokens + max_tokens > self.max_model_tokens:
            raise BadRequest(
                f"prompt of {prompt_tokens} tokens + max_tokens {max_tokens} = "
                f"{prompt_tokens + max_tokens}, more than the limit of {self.max_model_tokens}",
                field="max_tokens",
                remedy="shorten the prompt or lower max_tokens",
            )
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise BadRequest(
                f"token id {bad} is outside the vocabulary of {self.vocab_size}", field="prompt"
            )
        _check_sampling(request.sampling)


def _check_sampling(sampling: Sampling) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise BadRequest(
            f"temperature is {sampling.temperature}, must be finite and at least 0",
            field="temperature",
        )
    if not 0 < sampling.top_p <= 1:
        raise BadRequest(f"top_p is {sampling.top_p}, must be in (0, 1]", field="top_p")
    if sampling.top_k < 0:
        raise BadRequest(f"top_k is {sampling.top_k}, must be at least 0", field="top_k")
