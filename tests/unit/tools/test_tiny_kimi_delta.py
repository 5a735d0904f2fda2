"""The delta rule of training: chunks equal the token-by-token form, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sluice.models.kimi_linear.delta import Writes, scan
from tools.tiny_kimi_delta import CHUNK_TOKENS, delta_chunks, delta_scan

ROWS, TOKENS, HEADS, KEYS, VALUES = 2, 3 * CHUNK_TOKENS, 3, 8, 5


def _inputs(strongest_decay: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(ROWS, TOKENS, HEADS, *shape, generator=generator)

    q, k = (torch.nn.functional.normalize(random(KEYS), dim=-1) for _ in range(2))
    g = -torch.rand(ROWS, TOKENS, HEADS, KEYS, generator=generator) * strongest_decay
    tensors = [q, k, random(VALUES), g, torch.sigmoid(random())]
    return [tensor.requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("strongest_decay", [0.01, 1.0, 5.0])
def test_chunks_equal_the_scan_with_gradients(strongest_decay: float) -> None:
    results = []
    for form in (delta_scan, delta_chunks):
        inputs = _inputs(strongest_decay)
        out = form(*inputs)
        out.square().sum().backward()
        results.append([out.detach(), *(one.grad for one in inputs)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-3)


def test_scan_is_the_one_that_serves() -> None:
    q, k, v, g, beta = (one.detach() for one in _inputs(2.0))
    _, expected = scan(torch.zeros(ROWS, HEADS, KEYS, VALUES), Writes(k, v, g, beta), q)
    assert expected is not None
    torch.testing.assert_close(delta_scan(q, k, v, g, beta), expected, atol=1e-6, rtol=1e-5)


def test_chunks_stay_finite_when_a_gate_forgets_everything() -> None:
    inputs = _inputs(40.0)
    out = delta_chunks(*inputs)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in inputs)
