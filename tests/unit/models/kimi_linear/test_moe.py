"""The router against a loop over tokens; what the bias may and may not change."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from sluice.models.kimi_linear.moe import DenseWeights, MoeParams, MoeWeights, dense, moe, route

T, D, E, I = 7, 6, 8, 5  # noqa: E741
PARAMS = MoeParams(
    experts_per_token=2,
    num_groups=1,
    groups_per_token=1,
    renormalise=True,
    routed_scaling_factor=2.446,
)


@pytest.fixture
def weights() -> MoeWeights:
    g = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    shared = DenseWeights(noise(2 * I, D), noise(D, I))
    return MoeWeights(noise(E, D), 0.5 * noise(E), noise(E, 2 * I, D), noise(E, D, I), shared)


X = torch.randn(T, D, generator=torch.Generator().manual_seed(1))


def _expert(x_D: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    gate, up = (w13 @ x_D).chunk(2)
    return w2 @ (torch.nn.functional.silu(gate) * up)


def test_the_layer_is_a_weighted_sum_and_the_shared_expert(weights: MoeWeights) -> None:
    out = moe(X, weights, PARAMS)
    for t in range(T):
        scores = torch.sigmoid(weights.gate @ X[t])
        chosen = (scores + weights.bias).topk(2).indices
        share = scores[chosen] / scores[chosen].sum() * 2.446
        want = _expert(X[t], weights.shared.w13, weights.shared.w2)  # not scaled
        for expert, weight in zip(chosen, share, strict=True):
            want = want + weight * _expert(X[t], weights.w13[expert], weights.w2[expert])
        torch.testing.assert_close(out[t], want, rtol=1e-4, atol=1e-4)


def test_weights_without_renormalising(weights: MoeWeights) -> None:
    plain = route(X, weights, dataclasses.replace(PARAMS, renormalise=False))
    scores = torch.sigmoid(X @ weights.gate.T).gather(1, plain.expert_TK)
    torch.testing.assert_close(plain.weight_TK, scores * 2.446)


def test_the_bias_selects_but_does_not_weigh(weights: MoeWeights) -> None:
    pushed = dataclasses.replace(weights, bias=torch.zeros(E).index_fill(0, torch.tensor([3]), 9.0))
    routing = route(X, pushed, PARAMS)
    assert (routing.expert_TK == 3).any(1).all()
    scores = torch.sigmoid(X @ weights.gate.T).gather(1, routing.expert_TK)
    torch.testing.assert_close(routing.weight_TK, scores / scores.sum(1, keepdim=True) * 2.446)


def test_experts_come_from_the_best_groups(weights: MoeWeights) -> None:
    """Groups rank by the sum of their best two; a single best expert elsewhere doesn't count."""
    params = dataclasses.replace(PARAMS, num_groups=4, groups_per_token=1)
    bias = torch.tensor([50.0, -90.0, 20.0, 21.0, 0.0, 0.0, 0.0, 0.0])
    routing = route(X, dataclasses.replace(weights, bias=bias), params)
    assert routing.expert_TK.sort(1).values.tolist() == [[2, 3]] * T
    free = route(X, dataclasses.replace(weights, bias=bias), PARAMS)
    assert (free.expert_TK == 0).any(1).all()


def test_scores_that_underflow_stay_finite(weights: MoeWeights) -> None:
    dead = dataclasses.replace(weights, gate=torch.full((E, D), -1e4))
    assert route(torch.ones(1, D), dead, PARAMS).weight_TK.isfinite().all()


def test_dense_is_swiglu(weights: MoeWeights) -> None:
    want = _expert(X[0], weights.shared.w13, weights.shared.w2)
    torch.testing.assert_close(dense(X, weights.shared)[0], want, rtol=1e-4, atol=1e-5)
