"""Temperature, top-k, top-p and inverse-CDF sampling."""

from __future__ import annotations

import pytest
import torch

from sluice.spec.distribution import distribution, pick
from sluice.types import Sampling

LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))


def _probs(**sampling: float) -> list[float]:
    chosen = Sampling(**{"temperature": 1.0, **sampling})  # type: ignore[arg-type]
    probs: list[float] = distribution(LOGITS, [chosen])[0].tolist()
    return probs


def test_temperature_scales_logits() -> None:
    assert _probs() == pytest.approx([0.5, 0.25, 0.125, 0.125])
    squared = torch.tensor([0.5, 0.25, 0.125, 0.125]) ** 2
    assert _probs(temperature=0.5) == pytest.approx((squared / squared.sum()).tolist())


def test_greedy_is_one_hot_at_the_argmax() -> None:
    assert _probs(temperature=0.0) == [1.0, 0.0, 0.0, 0.0]


def test_top_k_keeps_the_k_most_probable_with_ties_by_token_id() -> None:
    assert _probs(top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert _probs(top_k=3)[3] == 0.0
    assert _probs(top_k=99) == pytest.approx([0.5, 0.25, 0.125, 0.125])


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.0, 1), (0.01, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (1.0, 4)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    assert sum(p > 0 for p in _probs(top_p=top_p)) == kept


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.0, 4), (0.24, 4), (0.26, 2), (0.49, 2), (0.51, 1), (1.0, 1)]
)
def test_min_p_keeps_what_is_near_enough_to_the_best(min_p: float, kept: int) -> None:
    probs = _probs(min_p=min_p)
    assert sum(p > 0 for p in probs) == kept
    assert sum(probs) == pytest.approx(1.0)


def test_min_p_comes_after_temperature_and_before_top_p() -> None:
    """At temperature 0.5 the ratios are squared: 0.25 / 0.5 becomes 1/4. What min-p cuts, top-p doesn't count."""
    assert sum(p > 0 for p in _probs(min_p=0.3, temperature=0.5)) == 1
    assert sum(p > 0 for p in _probs(min_p=0.3, temperature=1.0)) == 2
    assert _probs(min_p=0.3, top_p=0.66) == [1.0, 0.0, 0.0, 0.0]


def test_tokens_that_are_forbidden_stay_so_under_every_setting() -> None:
    logits = LOGITS.clone()
    logits[0, 0] = float("-inf")
    for extra in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.2}, {"temperature": 0.0}):
        chosen = Sampling(**{"temperature": 1.0, **extra})  # type: ignore[arg-type]
        probs = distribution(logits, [chosen])[0]
        assert float(probs[0]) == 0.0
        assert float(probs.sum()) == pytest.approx(1.0)


def test_top_p_counts_what_top_k_left() -> None:
    assert _probs(top_k=2, top_p=0.6) == [1.0, 0.0, 0.0, 0.0]


def test_rows_do_not_influence_one_another() -> None:
    settings = [
        Sampling(temperature=0.0),
        Sampling(temperature=1.0),
        Sampling(temperature=2.0, top_k=2),
        Sampling(temperature=0.7, top_p=0.6),
        Sampling(temperature=0.7, min_p=0.3),
    ]
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    together = distribution(logits, settings)
    for i, one in enumerate(settings):
        assert torch.equal(together[i : i + 1], distribution(logits[i : i + 1], [one]))


def test_pick_inverts_the_cdf_and_never_takes_what_has_no_probability() -> None:
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    below_one = 1 - 2**-53
    draws = [0.0, 0.2499, 0.25, 0.9, below_one]
    assert pick(p.expand(5, -1), draws) == [1, 1, 3, 3, 3]
    assert pick(p.expand(5, -1) * 0.3, draws) == [1, 1, 3, 3, 3]
