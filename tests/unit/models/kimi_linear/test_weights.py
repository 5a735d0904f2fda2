"""Names in every spelling, and the forms that weights are read into."""

from __future__ import annotations

import pytest
import torch

from sluice.models.kimi_linear.config import parse_config
from sluice.models.kimi_linear.names import canonical_name
from sluice.models.kimi_linear.weights import KdaWeights, MlaWeights, _by_head, read_target
from tests.unit.models.kimi_linear.tiny import RandomSource, published

CONFIG = parse_config(published())


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.0.self_attn.A_log", "layers.0.self_attn.A_log"),
        ("model.layers.0.self_attn.forget_gate.A_log", "layers.0.self_attn.A_log"),
        (
            "model.layers.0.self_attn.forget_gate.f_a_proj.weight",
            "layers.0.self_attn.f_a_proj.weight",
        ),
        ("model.layers.0.block_sparse_moe.gate_proj.weight", "layers.0.mlp.gate_proj.weight"),
        (
            "model.layers.3.block_sparse_moe.experts.5.w1.weight",
            "layers.3.mlp.experts.5.w1.weight",
        ),
        ("model.layers.3.mlp.experts.gate_up_proj", "layers.3.mlp.experts.w13.weight"),
        ("model.layers.3.mlp.experts.down_proj", "layers.3.mlp.experts.w2.weight"),
        ("model.layers.3.mlp.experts.5.up_proj.weight", "layers.3.mlp.experts.5.w3.weight"),
        (
            "model.layers.3.block_sparse_moe.shared_experts.up_proj.weight",
            "layers.3.mlp.shared_experts.up_proj.weight",
        ),
        ("something.else", "something.else"),
    ],
)
def test_names(stored: str, canonical: str) -> None:
    assert canonical_name(stored) == canonical


def test_every_name_is_taken_once() -> None:
    source = RandomSource()
    read_target(source, CONFIG)
    assert len(set(source.names)) == len(source.names)
    assert "layers.0.mlp.down_proj.weight" in source.names
    assert "layers.1.mlp.experts.7.w2.weight" in source.names
    kda = {name for name in source.names if name.startswith("layers.1.self_attn.")}
    mla = {name for name in source.names if name.startswith("layers.2.self_attn.")}
    assert (len(kda), len(mla)) == (15, 5)


def test_channels_are_ordered_by_head() -> None:
    q, k, v = torch.arange(0.0, 4), torch.arange(10.0, 14), torch.arange(20.0, 26)
    rows = _by_head([part.unsqueeze(1) for part in (q, k, v)], heads=2).flatten()
    assert rows.tolist() == [0, 1, 10, 11, 20, 21, 22, 2, 3, 12, 13, 23, 24, 25]


def test_shapes() -> None:
    weights = read_target(RandomSource(), CONFIG)
    kda, mla = weights.layers[0].attn, weights.layers[2].attn
    assert isinstance(kda, KdaWeights)
    assert isinstance(mla, MlaWeights)
    assert kda.w_in.shape == (2 * (16 + 16 + 32) + 32 + 32 + 2, 64)
    assert kda.conv_WC.shape == (4, 128)
    assert (kda.rate_H > 0).all()
    assert mla.w_in.shape == (4 * (16 + 8) + 16 + 8, 64)
    assert mla.absorb_HnL.shape == (4, 16, 16)
    assert mla.expand_HLV.shape == (4, 16, 16)
