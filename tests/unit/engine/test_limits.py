"""What is refused before it is queued."""

from __future__ import annotations

import math

import pytest

from sluice.config import EngineConfig
from sluice.engine.limits import MAX_PROMPT_SCORES, RequestLimits
from sluice.errors import BadRequest
from tests.unit.engine.toy_model import VOCAB, ToyTarget, request

LIMITS = RequestLimits(max_model_tokens=20, vocab_size=VOCAB)


def test_the_tighter_of_model_and_configuration_counts() -> None:
    info = ToyTarget().info
    assert RequestLimits.of(info, EngineConfig(max_model_tokens=100)).max_model_tokens == 100
    assert RequestLimits.of(info, EngineConfig(max_model_tokens=9000)).max_model_tokens == 4096


def test_exactly_the_limit_is_fine_and_one_more_names_both() -> None:
    LIMITS.check(request("r", [1] * 8, max_tokens=12))
    with pytest.raises(BadRequest, match=r"prompt of 8 tokens \+ max_tokens 13 = 21.*limit of 20"):
        LIMITS.check(request("r", [1] * 8, max_tokens=13))


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ((), {}, "prompt"),
        ((1, VOCAB), {}, "prompt"),
        ((-1, 2), {}, "prompt"),
        ((1,), {"max_tokens": 0}, "max_tokens"),
        ((1,), {"temperature": -0.1}, "temperature"),
        ((1,), {"temperature": math.inf}, "temperature"),
        ((1,), {"temperature": math.nan}, "temperature"),
        ((1,), {"top_p": -0.01}, "top_p"),
        ((1,), {"top_p": 1.01}, "top_p"),
        ((1,), {"top_k": -1}, "top_k"),
        ((1,), {"min_p": -0.01}, "min_p"),
        ((1,), {"min_p": math.nan}, "min_p"),
        ((1,), {"min_tokens": -1}, "min_tokens"),
        ((1,), {"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ((1,), {"presence_penalty": 2.1}, "presence_penalty"),
        ((1,), {"frequency_penalty": math.nan}, "frequency_penalty"),
        ((1,), {"repetition_penalty": 0.0}, "repetition_penalty"),
        ((1,), {"repetition_penalty": math.inf}, "repetition_penalty"),
        ((1,), {"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ((1,), {"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
        ((1,), {"logit_bias": ((1, 100.1),)}, "logit_bias"),
        ((1,), {"logit_bias": ((1, math.nan),)}, "logit_bias"),
        ((1,), {"logprobs": 21}, "logprobs"),
        ((1,), {"logprobs": -1}, "logprobs"),
        ((1,), {"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_bad_values_are_refused_by_field(
    prompt: tuple[int, ...], sampling: dict[str, object], field: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        LIMITS.check(request("r", prompt, **sampling))
    assert refused.value.field == field


def test_scores_of_a_huge_prompt_are_refused_before_anything_is_computed() -> None:
    wide = RequestLimits(max_model_tokens=1 << 20, vocab_size=VOCAB)
    prompt = [1] * (MAX_PROMPT_SCORES // 8 + 1)
    wide.check(request("r", prompt, prompt_logprobs=6))
    with pytest.raises(BadRequest, match="524296 scores") as refused:
        wide.check(request("r", prompt, prompt_logprobs=7))
    assert refused.value.field == "prompt_logprobs"
