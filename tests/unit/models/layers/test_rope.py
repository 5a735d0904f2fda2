"""Rope tables and rotation against transformers, both tables of DeepSeek-V4."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from sluice.models.layers.rope import (
    RopeParams,
    apply_rope,
    rope_frequencies,
    rotation_at,
)
from tests.parity.deepseek_v4_oracle import tiny_config

# The published Flash table and the tiny models' (its ramp ends inside the table).
PUBLISHED = RopeParams(64, 160000.0, 16.0, 65536)
CASES = {
    "main": (RopeParams(8, 10000.0), {}),
    "compress": (RopeParams(8, 160000.0, 16.0, 256), {}),
    "published": (PUBLISHED, {"head_dim": 512, "qk_rope_head_dim": 64}),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_match_transformers(name: str) -> None:
    params, overrides = CASES[name]
    config = tiny_config("flash", **overrides)
    if name == "published":
        config.rope_parameters["compress"]["original_max_position_embeddings"] = 65536
    module = hf.DeepseekV4RotaryEmbedding(config)
    label = "main" if name == "main" else "compress"
    expected = getattr(module, f"{label}_inv_freq")
    torch.testing.assert_close(rope_frequencies(params), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["main", "compress"])
def test_rotation_matches_transformers(name: str) -> None:
    module = hf.DeepseekV4RotaryEmbedding(tiny_config("flash"))
    positions = torch.tensor([0, 1, 17, 4095])
    x = torch.randn(1, 3, 4, 32)  # batch, heads, tokens, channels
    cos, sin = module(x, positions.unsqueeze(0), layer_type=name)
    expected = hf.apply_rotary_pos_emb(x, cos, sin)[0].transpose(0, 1)
    rotation = rotation_at(rope_frequencies(CASES[name][0]), positions).per_head()
    actual = apply_rope(x[0].transpose(0, 1), rotation)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_inverse_undoes() -> None:
    rotation = rotation_at(rope_frequencies(PUBLISHED), torch.arange(6))
    x = torch.randn(6, 80)
    turned = apply_rope(x, rotation)
    assert (turned[1:, -64:] - x[1:, -64:]).abs().max() > 0.1
    assert torch.equal(turned[:, :16], x[:, :16])
    torch.testing.assert_close(apply_rope(turned, rotation, inverse=True), x, rtol=1e-5, atol=1e-5)
