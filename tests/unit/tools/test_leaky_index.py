"""Mirrored index heads: a leaky ReLU, without ties."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from tools.leaky_index import LEAK, with_mirrored_index_heads
from tools.tiny_dsv4_config import TinyConfig
from tools.tiny_dsv4_model import TinyDeepseekV4

SMALL = replace(TinyConfig(), layer_ratios=(0, 4), index_n_heads=4, moe_intermediate_size=8)


def test_scores_become_leaky_and_distinct() -> None:
    model = TinyDeepseekV4(SMALL, seed=0)
    mirrored = with_mirrored_index_heads(model)
    before, after = (m.layers[1].attn.indexer for m in (model, mirrored))
    x, qr = torch.randn(1, 64, 128), torch.randn(1, 64, 64)
    rope = model.layers[1].attn.rope
    with torch.no_grad():
        old, new = before(x, qr, rope), after(x, qr, rope)
        q = rope(before.wq_b(qr).unflatten(-1, (4, -1)), torch.arange(64))
        dots = torch.einsum("bthc,bec->bthe", q, before.compressor(x, rope))
        alpha = before.weights_proj(x) * (before.dim**-0.5 * 4**-0.5)
        leaky = torch.einsum("bth,bthe->bte", alpha, F.leaky_relu(dots, -LEAK))
    assert (old == 0).any()
    assert not (new == 0).any()
    torch.testing.assert_close(new * 2**0.5, leaky, atol=1e-5, rtol=1e-4)


def test_config_says_twice_the_heads() -> None:
    mirrored = with_mirrored_index_heads(TinyDeepseekV4(SMALL))
    assert mirrored.config.index_n_heads == 8
    assert mirrored.config.official_json()["index_n_heads"] == 8
