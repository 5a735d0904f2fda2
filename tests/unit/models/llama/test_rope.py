"""Rotary embedding: rotations keep lengths, meet transformers' tables, and depend on distance only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sluice.models.llama.rope import (
    RopeKind,
    RopeParams,
    apply_rope,
    rope_frequencies,
    rotation_at,
)

D = 64
TABLES = {
    "default": (RopeParams(D, 1e5), {}),
    "linear": (RopeParams(D, 1e5, RopeKind.LINEAR, 4.0), {"factor": 4.0}),
    "llama3": (
        RopeParams(D, 1e5, RopeKind.LLAMA3, 8.0, 256, 1.0, 4.0),
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_frequencies_equal_transformers(name: str) -> None:
    params, scaling = TABLES[name]
    settings = {"rope_type": name, "rope_theta": 1e5, **scaling}
    config = LlamaConfig(
        hidden_size=2 * D,
        num_attention_heads=2,
        rope_parameters=settings,
        max_position_embeddings=2048,
    )
    expected: Tensor = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(rope_frequencies(params), expected, rtol=1e-6, atol=0)


def test_llama3_keeps_fast_pairs_divides_slow_ones_and_blends_between() -> None:
    params, _ = TABLES["llama3"]
    ratio_F = rope_frequencies(params) / rope_frequencies(RopeParams(D, 1e5))
    assert ratio_F[0] == 1
    assert ratio_F[-1] == 1 / 8
    assert ((ratio_F > 1 / 8) & (ratio_F < 1)).any()


def test_scores_depend_on_distance_only() -> None:
    freq_F = rope_frequencies(RopeParams(D, 1e4))
    q, k = torch.randn(2, 1, 3, D, generator=torch.Generator().manual_seed(0)).unbind(0)

    def score(query: int, key: int) -> Tensor:
        turned_q = apply_rope(q, rotation_at(freq_F, torch.tensor([query])))
        turned_k = apply_rope(k, rotation_at(freq_F, torch.tensor([key])))
        return (turned_q * turned_k).sum(-1)

    torch.testing.assert_close(score(17, 5), score(112, 100), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(score(9, 9), (q * k).sum(-1), rtol=1e-4, atol=1e-4)
    assert (score(17, 5) - score(5, 17)).abs().max() > 0.1


def test_halves_are_paired_and_dtype_stays() -> None:
    """Channel i turns with i + d/2: a unit vector in channel 1 reaches channel 1 + d/2 only."""
    freq_F = rope_frequencies(RopeParams(D, 1e4))
    x = torch.zeros(1, 1, D, dtype=torch.bfloat16)
    x[..., 1] = 1
    turned = apply_rope(x, rotation_at(freq_F, torch.tensor([1])))
    assert turned.dtype is torch.bfloat16
    assert turned[0, 0].nonzero().flatten().tolist() == [1, 1 + D // 2]
