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
    ("top_p", "kept"), [(0.01, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (1.0, 4)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    assert sum(p > 0 for p in _probs(top_p=top_p)) == kept


def test_top_p_counts_what_top_k_left() -> None:
    assert _probs(top_k=2, top_p=0.6) == [1.0, 0.0, 0.0, 0.0]


def test_rows_do_not_influence_one_another() -> None:
    settings = [
        Sampling(temperature=0.0),
        Sampling(temperature=1.0),
        Sampling(temperature=2.0, top_k=2),
        Sampling(temperature=0.7, top_p=0.6),
    ]
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    together = distribution(logits, settings)
    for i, one in enumerate(settings):
        assert torch.equal(together[i : i + 1], distribution(logits[i : i + 1], [one]))


def test_pick_inverts_the_cdf_and_never_takes_what_has_no_probability() -> None:
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    below_one = 1 - 2**-53
    draws = [0.0, 0.2499, 0.25, 0.9, below_one]
    assert pick(p.expand(5, -1), draws) == [1, 1, 3, 3, 3]
    assert pick(p.expand(5, -1) * 0.3, draws) == [1, 1, 3, 3, 3]
