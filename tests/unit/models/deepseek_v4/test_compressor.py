"""Window pooling against transformers' compressors, and garbage in a first window's empty slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from sluice.models.deepseek_v4.compressor import CompressorWeights, pool_windows, project_rows
from sluice.models.layers.rope import RopeParams, Rotation, rope_frequencies, rotation_at
from tests.parity.deepseek_v4_oracle import randomise, tiny_config

CONFIG = tiny_config("short_hca")
COMPRESS = RopeParams(8, 160000.0, 16.0, 256)
NUM_TOKENS = 39


def _weights(module: torch.nn.Module) -> CompressorWeights:
    return CompressorWeights(
        module.kv_proj.weight, module.gate_proj.weight, module.kv_norm.weight, module.position_bias
    )


def _rotation(num_windows: int, ratio: int) -> Rotation:
    return rotation_at(rope_frequencies(COMPRESS), torch.arange(num_windows) * ratio)


def _oracle_entries(module: torch.nn.Module, x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[0]).unsqueeze(0)
    q_residual = torch.zeros(1, x.shape[0], 48)
    entries, _ = module(x.unsqueeze(0), q_residual, positions, None, 0)
    return entries[0, 0]


def test_without_overlap_matches_transformers() -> None:
    module = hf.DeepseekV4HCACompressor(CONFIG)
    randomise(module, 5)
    x = torch.randn(NUM_TOKENS, 96)
    rows = project_rows(x, _weights(module))[:32].unflatten(0, (2, 16))
    first = torch.tensor([True, False])
    actual = pool_windows(rows, _weights(module), first, _rotation(2, 16), 1e-6)
    torch.testing.assert_close(actual, _oracle_entries(module, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("garbage", [0.0, float("nan")])
def test_with_overlap_matches_transformers(garbage: float) -> None:
    module = hf.DeepseekV4CSACompressor(CONFIG)
    randomise(module, 6)
    x = torch.randn(NUM_TOKENS, 96)
    rows = project_rows(x, _weights(module))
    before = torch.full((4, rows.shape[1]), garbage)
    padded = torch.cat((before, rows))
    windows = torch.stack([padded[4 * w : 4 * w + 8] for w in range(9)])
    first = torch.arange(9) == 0
    actual = pool_windows(windows, _weights(module), first, _rotation(9, 4), 1e-6)
    positions = torch.arange(NUM_TOKENS).unsqueeze(0)
    entries, _ = _csa_entries(module, x, positions)
    torch.testing.assert_close(actual, entries, rtol=1e-4, atol=1e-5)


def _csa_entries(
    module: torch.nn.Module, x: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    entries, mask = module(x.unsqueeze(0), torch.randn(1, x.shape[0], 48), positions, None, 0)
    return entries[0, 0], mask
