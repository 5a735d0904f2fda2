"""Log-probabilities against the definition."""

from __future__ import annotations

import math

import pytest
import torch

from sluice.spec.logprobs import score
from sluice.types import Logprobs, TokenLogprob

LOGITS = torch.log(torch.tensor([[0.5, 0.125, 0.25, 0.125], [0.1, 0.2, 0.3, 0.4]])) + 3.0


def test_own_logprob_and_the_best_alternatives_best_first() -> None:
    first, second = score(LOGITS, (1, 3), 2)
    assert first.logprob == pytest.approx(math.log(0.125))
    assert [c.token_id for c in first.top] == [0, 2]
    assert [c.logprob for c in first.top] == pytest.approx([math.log(0.5), math.log(0.25)])
    assert second.logprob == pytest.approx(math.log(0.4))
    assert second.top[0] == TokenLogprob(3, second.logprob)


def test_no_alternatives_and_more_than_there_are_tokens() -> None:
    assert score(LOGITS[:1], (0,), 0) == (Logprobs(pytest.approx(math.log(0.5))),)
    assert len(score(LOGITS[:1], (0,), 20)[0].top) == 4


def test_values_are_float32_so_the_wire_loses_nothing() -> None:
    for one in score(torch.randn(3, 50, dtype=torch.float64), (4, 5, 6), 3):
        for value in (one.logprob, *(candidate.logprob for candidate in one.top)):
            assert float(torch.tensor(value, dtype=torch.float32)) == value


def test_no_rows() -> None:
    assert score(LOGITS[:0], (), 3) == ()
