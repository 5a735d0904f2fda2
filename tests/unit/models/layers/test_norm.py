"""rms_norm against transformers' module, and its accumulation dtype."""

from __future__ import annotations

import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from sluice.models.layers.norm import rms_norm


def test_weighted_matches_transformers() -> None:
    module = hf.DeepseekV4RMSNorm(24, eps=1e-6)
    with torch.no_grad():
        module.weight.copy_(torch.randn(24))
    x = 3 * torch.randn(5, 24)
    torch.testing.assert_close(rms_norm(x, module.weight, 1e-6), module(x), rtol=1e-6, atol=1e-6)


def test_unweighted_matches_transformers() -> None:
    x = torch.randn(2, 3, 24)
    expected = hf.DeepseekV4UnweightedRMSNorm(1e-6)(x)
    torch.testing.assert_close(rms_norm(x, None, 1e-6), expected, rtol=1e-6, atol=1e-6)


def test_half_precision_accumulates_in_float32() -> None:
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # squares overflow float16
    torch.testing.assert_close(rms_norm(x, None, 1e-6), torch.ones(1, 4096, dtype=torch.float16))


def test_float64_stays_float64() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm(x, None, 1e-6), expected, rtol=1e-14, atol=1e-14)
