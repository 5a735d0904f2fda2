"""Muon: updates are close to orthogonal and go downhill."""

from __future__ import annotations

import torch
from torch import nn

from tools.muon import Muon, orthogonalise


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 16, 64), (3, 64, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.5
        assert values.max() < 1.4


def test_steps_go_downhill_and_drop_gradients() -> None:
    torch.manual_seed(0)
    weight, goal = nn.Parameter(torch.zeros(8, 8)), torch.randn(8, 8)
    muon = Muon([weight])
    muon.lr = 0.1
    start = (weight - goal).square().mean().item()
    for _ in range(40):
        (weight - goal).square().mean().backward()
        muon.step()
        assert weight.grad is None
    assert (weight - goal).square().mean().item() < start / 2
