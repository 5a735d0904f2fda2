"""The MoE against transformers' block: both routers, both ways to run experts, the clamp."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from sluice.models.layers import moe as subject
from sluice.models.layers.moe import MoeParams, MoeWeights, moe, route
from tests.parity.deepseek_v4_oracle import randomise, tiny_config

PARAMS = MoeParams(experts_per_token=2, routed_scaling_factor=1.5, swiglu_limit=10.0)


def _build(*, hashed: bool, scale: float = 1.0) -> tuple[hf.DeepseekV4SparseMoeBlock, MoeWeights]:
    layer = 0 if hashed else 1  # the tiny model's first layer is hash-routed
    block = hf.DeepseekV4SparseMoeBlock(tiny_config("flash"), layer)
    randomise(block, 3)
    with torch.no_grad():
        block.experts.gate_up_proj.mul_(scale)
        block.shared_experts.gate_proj.weight.mul_(scale)
        block.shared_experts.up_proj.weight.mul_(scale)
    shared = block.shared_experts
    return block, MoeWeights(
        gate=block.gate.weight,
        bias=None if hashed else block.gate.e_score_correction_bias,
        tid2eid=block.gate.tid2eid if hashed else None,
        w13=block.experts.gate_up_proj,
        w2=block.experts.down_proj,
        shared_w13=torch.cat((shared.gate_proj.weight, shared.up_proj.weight)),
        shared_w2=shared.down_proj.weight,
    )


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("dense_limit", [0, 1 << 62], ids=["sorted", "dense"])
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_matches_transformers(
    monkeypatch: pytest.MonkeyPatch, hashed: bool, dense_limit: int, num_tokens: int
) -> None:
    monkeypatch.setattr(subject, "_DENSE_LIMIT_PRODUCTS", dense_limit)
    block, weights = _build(hashed=hashed)
    x, ids = torch.randn(num_tokens, 96), torch.randint(0, 256, (num_tokens,))
    expected = block(x.unsqueeze(0), input_ids=ids.unsqueeze(0))[0]
    torch.testing.assert_close(moe(x, ids, weights, PARAMS), expected, rtol=1e-4, atol=1e-5)


def test_clamp_matches_transformers_where_it_bites() -> None:
    block, weights = _build(hashed=False, scale=40.0)
    x, ids = torch.randn(5, 96), torch.zeros(5, dtype=torch.int64)
    expected = block(x.unsqueeze(0))[0]
    torch.testing.assert_close(moe(x, ids, weights, PARAMS), expected, rtol=1e-4, atol=1e-3)
    unclamped = moe(x, ids, weights, MoeParams(2, 1.5, 1e9))
    assert (unclamped - expected).abs().max() > 1.0


def test_bias_selects_but_does_not_weigh() -> None:
    _, weights = _build(hashed=False)
    assert weights.bias is not None
    x = torch.randn(4, 96)
    weights.bias.zero_()[5] = 100.0
    routing = route(x, torch.zeros(4, dtype=torch.int64), weights, PARAMS)
    assert bool((routing.expert_TK == 5).any(-1).all())
    assert routing.weight_TK.max() < 1.5
    torch.testing.assert_close(routing.weight_TK.sum(-1), torch.full((4,), 1.5))


@pytest.mark.parametrize("dense_limit", [0, 1 << 62], ids=["sorted", "dense"])
def test_gradients_reach_router_and_experts(
    monkeypatch: pytest.MonkeyPatch, dense_limit: int
) -> None:
    monkeypatch.setattr(subject, "_DENSE_LIMIT_PRODUCTS", dense_limit)
    _, weights = _build(hashed=False)
    moe(torch.randn(6, 96), torch.zeros(6, dtype=torch.int64), weights, PARAMS).sum().backward()
    for tensor in (weights.gate, weights.w13, weights.w2):
        assert tensor.grad is not None
        assert bool((tensor.grad != 0).any())
