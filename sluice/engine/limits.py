"""Which requests the engine takes at all, checked before anything is queued."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sluice.config import EngineConfig
from sluice.errors import BadRequest
from sluice.models.base import ModelInfo
from sluice.types import Request, Sampling

MAX_ALTERNATIVES = 20  # beside each token's own logprob; OpenAI's limit
MAX_BIAS = 100.0  # OpenAI's, as is the next
MAX_PENALTY = 2.0
MAX_PROMPT_SCORES = 1 << 19  # kept until a prompt is done, and sent as one message of about 6 MB


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
        _check_choice(request.sampling)
        _check_penalties(request.sampling)
        self._check_tokens(request.sampling)
        _check_logprobs(request.sampling, prompt_tokens)

    def _check_tokens(self, sampling: Sampling) -> None:
        """Fields that name tokens, or count them."""
        if not 0 <= sampling.min_tokens <= sampling.max_tokens:
            raise BadRequest(
                f"min_tokens is {sampling.min_tokens}, must be in 0..max_tokens, which is "
                f"{sampling.max_tokens}",
                field="min_tokens",
            )
        seen: set[int] = set()
        for token, bias in sampling.logit_bias:
            if not 0 <= token < self.vocab_size:
                raise BadRequest(
                    f"logit_bias names token {token}, the vocabulary has {self.vocab_size}",
                    field="logit_bias",
                )
            if token in seen:
                raise BadRequest(f"logit_bias names token {token} twice", field="logit_bias")
            seen.add(token)
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise BadRequest(
                    f"logit_bias of token {token} is {bias}, must be in -{MAX_BIAS}..{MAX_BIAS}",
                    field="logit_bias",
                )


def _check_choice(sampling: Sampling) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise BadRequest(
            f"temperature is {sampling.temperature}, must be finite and at least 0",
            field="temperature",
        )
    if not 0 <= sampling.top_p <= 1:  # 0: the likeliest token, as in OpenAI's API
        raise BadRequest(f"top_p is {sampling.top_p}, must be in [0, 1]", field="top_p")
    if sampling.top_k < 0:
        raise BadRequest(f"top_k is {sampling.top_k}, must be at least 0", field="top_k")
    if not 0 <= sampling.min_p <= 1:
        raise BadRequest(f"min_p is {sampling.min_p}, must be in [0, 1]", field="min_p")


def _check_penalties(sampling: Sampling) -> None:
    for name, value in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
    ):
        if not -MAX_PENALTY <= value <= MAX_PENALTY:
            raise BadRequest(
                f"{name} is {value}, must be in -{MAX_PENALTY}..{MAX_PENALTY}", field=name
            )
    value = sampling.repetition_penalty
    if not (math.isfinite(value) and value > 0):
        raise BadRequest(
            f"repetition_penalty is {value}, must be finite and above 0",
            field="repetition_penalty",
        )


def _check_logprobs(sampling: Sampling, prompt_tokens: int) -> None:
    for name, count in (
        ("logprobs", sampling.logprobs),
        ("prompt_logprobs", sampling.prompt_logprobs),
    ):
        if count is not None and not 0 <= count <= MAX_ALTERNATIVES:
            raise BadRequest(f"{name} is {count}, must be in 0..{MAX_ALTERNATIVES}", field=name)
    if sampling.prompt_logprobs is None:
        return
    scores = prompt_tokens * (sampling.prompt_logprobs + 1)
    if scores > MAX_PROMPT_SCORES:
        raise BadRequest(
            f"prompt_logprobs {sampling.prompt_logprobs} of a prompt of {prompt_tokens} tokens are "
            f"{scores} scores, more than the limit of {MAX_PROMPT_SCORES}",
            field="prompt_logprobs",
            remedy="ask for fewer alternatives, or of a shorter prompt",
        )
