"""Partial attentions merged by their log-sums: any base, ranks and rows without keys, every boundary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sluice.parallel.context import Partial, merge, own_lengths
from sluice.parallel.group import Parallel
from tests.unit.parallel.ranks import run_ranks

HEADS, WIDTH = 3, 5


def _attention(scores_PHE: Tensor, values_EL: Tensor, base: float) -> Partial:
    """One kernel's answer over some keys; garbage where there are none."""
    lse = torch.logsumexp(scores_PHE, dim=-1)
    weights = (scores_PHE - lse.unsqueeze(-1)).exp()
    out = weights @ values_EL
    out[lse == -math.inf] = math.nan
    return Partial(out, lse / math.log(base), base)


@pytest.mark.parametrize("base", [math.e, 2.0], ids=["e", "2"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17])
def test_merged_parts_equal_the_whole(ranks: int, length: int, base: float) -> None:
    """Keys are dealt in turn; with fewer keys than ranks some have none, and join every collective."""
    generator = torch.Generator().manual_seed(length)
    scores = torch.randn(4, HEADS, length, generator=generator) * 8
    values = torch.randn(length, WIDTH, generator=generator)
    whole = torch.softmax(scores, dim=-1) @ values

    def work(group: Parallel) -> Tensor:
        own = slice(group.rank, None, ranks)
        return merge(_attention(scores[..., own], values[own], base), group)

    for merged in run_ranks(ranks, work):
        torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_rank_counts_the_tokens_that_it_holds(ranks: int) -> None:
    lengths = torch.arange(50)
    for rank in range(ranks):
        held = [len(range(rank, length, ranks)) for length in lengths.tolist()]
        assert own_lengths(lengths, ranks, rank).tolist() == held


def test_wrong_lse_base() -> None:
    """A kernel that works in powers of two and says e gives other numbers: the base must be its own."""
    generator = torch.Generator().manual_seed(0)
    scores, values = torch.randn(2, HEADS, 8, generator=generator) * 4, torch.randn(8, WIDTH)
    whole = torch.softmax(scores, dim=-1) @ values

    def work(group: Parallel) -> Tensor:
        own = slice(group.rank, None, 2)
        right = _attention(scores[..., own], values[own], 2.0)
        return merge(Partial(right.out, right.lse, math.e), group)

    for merged in run_ranks(2, work):
        assert (merged - whole).abs().max() > 1e-2


def test_a_row_that_nobody_has_keys_for_is_zero() -> None:
    def work(group: Parallel) -> Tensor:
        out = torch.full((1, HEADS, WIDTH), math.nan)
        return merge(Partial(out, torch.full((1, HEADS), -math.inf), math.e), group)

    for merged in run_ranks(2, work):
        assert torch.equal(merged, torch.zeros(1, HEADS, WIDTH))
