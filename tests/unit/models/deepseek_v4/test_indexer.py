"""Top-k selection: the set is right, sorted, and the same however ties fall."""

from __future__ import annotations

import torch

from sluice.models.deepseek_v4.indexer import top_ordinals

INF = float("-inf")


def test_selects_the_highest_in_order() -> None:
    scores = torch.tensor([[0.1, 5.0, 3.0, 4.0, -1.0]])
    assert top_ordinals(scores, 3).tolist() == [[1, 2, 3]]


def test_ties_go_to_the_older_entry() -> None:
    scores = torch.tensor([[0.0, 0.0, 7.0, 0.0, 0.0], [1.0, 2.0, 2.0, 2.0, 2.0]])
    assert top_ordinals(scores, 3).tolist() == [[0, 1, 2], [1, 2, 3]]


def test_fewer_visible_than_k_keeps_all_of_them() -> None:
    scores = torch.tensor([[2.0, 1.0, INF, INF, INF], [INF] * 5])
    assert top_ordinals(scores, 3).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_random_scores_match_a_stable_sort() -> None:
    scores = torch.randint(0, 6, (50, 40), generator=torch.Generator().manual_seed(0)).float()
    stable = scores.sort(dim=-1, descending=True, stable=True).indices[:, :8].sort().values
    assert torch.equal(top_ordinals(scores, 8), stable)


def test_later_entries_do_not_change_what_ties_select() -> None:
    """The same prompt in another schedule sees more (hidden) columns."""
    scores = torch.zeros(1, 6)
    padded = torch.cat((scores, torch.full((1, 10), INF)), dim=1)
    assert torch.equal(top_ordinals(scores, 4), top_ordinals(padded, 4))
