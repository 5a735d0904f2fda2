"""What the trainers share: rate, clock, weighted loss, router balance, and who is trained by what."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tools.training_loop import (
    BIAS_STEP,
    Clock,
    Optimiser,
    Rates,
    balance,
    rate_at,
    weighted_loss,
)


def test_rate_warms_up_and_decays() -> None:
    assert rate_at(0, 0.0) < 0.05
    assert rate_at(100, 0.3) == 1.0
    assert rate_at(100, 0.999) == pytest.approx(0.02)


def test_clock_ends_with_steps_or_minutes() -> None:
    assert Clock(10, 60.0).progress(5) == pytest.approx(0.5, abs=1e-3)
    assert Clock(10, 60.0).progress(10) == 1.0
    assert Clock(10, 1e-9).progress(1) > 1.0
    assert Clock(0, 60.0).progress(0) == 1.0


def test_weighted_loss_ignores_what_weighs_nothing() -> None:
    logits = torch.tensor([[[4.0, 0.0], [0.0, 4.0], [0.0, 4.0]]])
    right, weight = torch.tensor([[0, 1, 0]]), torch.tensor([[1.0, 1.0, 0.0]])
    assert weighted_loss(logits, right, weight).item() < 0.05
    assert weighted_loss(logits, right, 1 - weight).item() > 3.0


def test_balance_favours_experts_with_little_load() -> None:
    bias = torch.zeros(3)
    balance(bias, torch.tensor([9.0, 2.0, 1.0]))
    assert bias.tolist() == pytest.approx([-BIAS_STEP, BIAS_STEP, BIAS_STEP])


def test_optimiser_moves_both_kinds_and_drops_gradients() -> None:
    torch.manual_seed(0)
    named = {"w": nn.Parameter(torch.randn(4, 3)), "b": nn.Parameter(torch.randn(4))}
    before = {name: value.detach().clone() for name, value in named.items()}
    optimiser = Optimiser(named, Rates(adam=0.1, muon=0.1), lambda _, value: value.dim() == 2)
    (named["w"].sum() + named["b"].sum()).backward()
    optimiser.step(1.0)
    for name, value in named.items():
        assert value.grad is None
        assert not torch.equal(value, before[name])
