"""Hyper-connections against transformers' modules, and what Sinkhorn promises."""

from __future__ import annotations

import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from sluice.models.layers.hyper import (
    HyperParams,
    HyperWeights,
    hyper_collapse,
    hyper_expand,
    hyper_mix,
    sinkhorn,
)
from tests.parity.deepseek_v4_oracle import randomise, tiny_config

PARAMS = HyperParams(num_streams=4, sinkhorn_iters=20, hc_eps=1e-6, norm_eps=1e-6)
CONFIG = tiny_config("flash", hc_sinkhorn_iters=20)


def test_mix_and_expand_match_transformers() -> None:
    module = hf.DeepseekV4HyperConnection(CONFIG)
    randomise(module, 1)
    streams, out = torch.randn(7, 4, 96), torch.randn(7, 96)
    post, comb, collapsed = (part[0] for part in module(streams.unsqueeze(0)))
    mix = hyper_mix(streams, HyperWeights(module.fn, module.base, module.scale), PARAMS)
    torch.testing.assert_close(mix.collapsed_TD, collapsed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mix.post_TN, post, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mix.comb_TNN, comb, rtol=1e-5, atol=1e-5)
    expected = post.unsqueeze(-1) * out.unsqueeze(1) + torch.einsum("tjk,tjd->tkd", comb, streams)
    torch.testing.assert_close(hyper_expand(out, streams, mix), expected, rtol=1e-5, atol=1e-5)


def test_collapse_matches_transformers() -> None:
    module = hf.DeepseekV4HyperHead(CONFIG)
    randomise(module, 2)
    streams = torch.randn(5, 4, 96)
    weights = HyperWeights(module.hc_fn, module.hc_base, module.hc_scale)
    expected = module(streams.unsqueeze(0))[0]
    torch.testing.assert_close(
        hyper_collapse(streams, weights, PARAMS), expected, rtol=1e-5, atol=1e-5
    )


def test_sinkhorn_is_doubly_stochastic_and_not_symmetric() -> None:
    comb = sinkhorn(torch.randn(9, 4, 4), PARAMS)
    torch.testing.assert_close(comb.sum(1), torch.ones(9, 4), rtol=0, atol=1e-4)
    torch.testing.assert_close(comb.sum(2), torch.ones(9, 4), rtol=0, atol=1e-2)
    assert (comb - comb.transpose(1, 2)).abs().max() > 0.05


def test_gradients_reach_every_weight() -> None:
    weights = HyperWeights(
        *(torch.randn(shape, requires_grad=True) for shape in ((24, 4 * 8), (24,), (3,)))
    )
    streams = torch.randn(3, 4, 8)
    mix = hyper_mix(streams, weights, PARAMS)
    (hyper_expand(mix.collapsed_TD, streams, mix) ** 2).sum().backward()
    for tensor in (weights.fn, weights.base, weights.scale):
        assert tensor.grad is not None
        assert bool((tensor.grad != 0).any())
